"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    ast: true, // expressions are interpreted, so the page needs no eval
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
  };

  // Names and legends take what a narrow screen leaves them.
  function fitConfig(spec, width) {
    const { config, usermeta } = spec;
    const columns = Math.max(1, Math.floor((width - 60) / usermeta.legend_entry_width));
    return {
      ...config,
      legend: { ...config.legend, columns, titleLimit: width - 60 },
      axisX: { ...config.axisX, titleLimit: width, titleAnchor: width < 480 ? "end" : "middle" },
      axisY: { ...config.axisY, labelLimit: Math.min(config.axisY.labelLimit, 0.4 * width) },
    };
  }

  // A heat map has a width of its own: on a narrow screen it shrinks and its panels stand under each other.
  function fitToWidth(spec, width) {
    const fitted = { ...spec, config: fitConfig(spec, width) };
    const room = width - 60;
    if (spec.facet) {
      fitted.spec = { ...spec.spec, width: Math.min(spec.spec.width, room) };
      fitted.columns = Math.max(1, Math.min(spec.columns, Math.floor(width / (fitted.spec.width + 40))));
    } else if (spec.width !== "container") {
      fitted.width = Math.min(spec.width, room);
    }
    return fitted;
  }

  async function draw(container) {
    const spec = fitToWidth(specs[container.dataset.chart], container.clientWidth);
    try {
      await vegaEmbed(container, spec, options);
    } catch (error) {
      container.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  }

  function toCsv(spec) {
    const keys = spec.usermeta.columns.map((column) => column.key);
    const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
    const lines = spec.datasets[spec.data.name].map((row) => keys.map((key) => quoted(row[key])).join(","));
    return [keys.map(quoted).join(","), ...lines, ""].join("\r\n");
  }

  function saveCsv(button) {
    const address = URL.createObjectURL(new Blob([toCsv(specs[button.dataset.csv])], { type: "text/csv" }));
    const link = document.createElement("a");
    link.href = address;
    link.download = `figure-${Number(button.dataset.csv) + 1}.csv`;
    link.click();
    URL.revokeObjectURL(address);
  }

  for (const button of document.querySelectorAll("button[data-csv]")) {
    button.addEventListener("click", () => saveCsv(button));
  }
  Promise.allSettled(Array.from(document.querySelectorAll("[data-chart]"), draw)).then((results) => {
    document.documentElement.dataset.drawn = results.filter((result) => result.status === "fulfilled").length;
  });
})();
