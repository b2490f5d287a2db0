"""What a run leaves behind, what it refuses, and how it ends when it diverges."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from tiny_runs import MIXTURE, Recording, assert_same_run, tiny_run, tiny_text_run, without_times, write_corpus

from gatelab.data.synthetic import BigramBackcopy
from gatelab.diagnose.measure import Measurement, measure
from gatelab.model.accounting import count_parameters
from gatelab.model.decoder import Decoder
from gatelab.train import run_folder
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.divergence import DivergedError
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.loop import build, train
from gatelab.train.metrics import count_spikes, read_metrics
from gatelab.train.parallel import compilation, process
from gatelab.train.run_folder import RunFolder
from gatelab.train.source import Source, open_source
from gatelab.train.step import StepFigures, take_step


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def refuse_constants(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, dict[str, Any]]:
    """A finished run of the default kind, and what ``train`` returned."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train(tiny_run(), folder, cache)


@pytest.fixture
def begun(tmp_path: Path, cache: Path) -> Path:
    """A run stopped after seven of twelve steps."""
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(), tmp_path / "run", cache, Recording(7))
    return tmp_path / "run"


class TestFolder:
    def test_files(self, finished: tuple[Path, dict[str, Any]]) -> None:
        folder, result = finished
        assert {path.name for path in folder.iterdir()} - {".lock"} == {
            "settings.yaml",
            "environment.json",
            "data.json",
            "metrics.jsonl",
            "checkpoints",
            "measurement.json",
            "heldout_documents.safetensors",
            "result.json",
        }
        assert RunFolder(folder).settings == tiny_run() and RunFolder(folder).result == result

    def test_all_that_is_logged_is_finite_json(self, finished: tuple[Path, dict[str, Any]]) -> None:
        folder, _ = finished
        texts = [path.read_text() for path in folder.glob("*.json")]
        texts += (folder / "metrics.jsonl").read_text().splitlines()
        assert len(texts) > 20
        for text in texts:
            json.loads(text, parse_constant=refuse_constants)

    def test_environment_and_data_are_written_down(self, finished: tuple[Path, dict[str, Any]], cache: Path) -> None:
        folder, _ = finished
        environment = json.loads((folder / "environment.json").read_text())
        assert environment["torch"] == torch.__version__ and environment["threads"] == 1
        assert environment["compiled"] is False and environment["instruction_set"]
        data = json.loads((folder / "data.json").read_text())
        assert data["fingerprint"] == open_source(tiny_run(), cache).fingerprint and data["heldout"] == ["synthetic"]

    def test_logged_figures_are_those_of_the_model(self, finished: tuple[Path, dict[str, Any]], cache: Path) -> None:
        """Measured and scored again from the last checkpoint, figure by figure."""
        folder, result = finished
        source, decoder = open_source(tiny_run(), cache), load_decoder(checkpoints(folder / "checkpoints")[-1])
        (domain,) = source.heldout.values()
        rows = {kind: read_metrics(folder / "metrics.jsonl", kind)[-1] for kind in ("evaluation", "measurement")}
        with process.cpu_threads(1):
            summary = self._measured(source, decoder, 2).summary()
            partial, whole = score(decoder, domain, 3).figures(), score(decoder, domain).figures()
            final = self._measured(source, decoder, 5)
        assert 0 < summary["first_token_attention[other]"] < 1 and 0 < summary["gate_mean[trigger]"] < 1
        assert without_times(rows["measurement"]) == {"kind": "measurement", "step": 12, **summary}
        assert without_times(rows["evaluation"]) == {"kind": "evaluation", "step": 12, "domain": "synthetic", **partial}
        assert result["heldout"] == {"synthetic": whole} and result["measurement"] == final.summary()
        assert json.loads((folder / "measurement.json").read_text()) == json.loads(json.dumps(final.to_mapping()))
        assert partial["tokens"] == 4 * 19 and whole["tokens"] == 8 * 4 * 19 and summary["measured_tokens"] == 2 * 19

    def _measured(self, source: Source, decoder: Decoder, num_windows: int) -> Measurement:
        inputs = source.measured_windows(num_windows).inputs
        assert isinstance(source.train, BigramBackcopy)
        return measure(decoder, inputs, query_sets=source.train.query_sets(inputs))

    def test_steps_and_costs(self, finished: tuple[Path, dict[str, Any]]) -> None:
        folder, result = finished
        steps = read_metrics(folder / "metrics.jsonl", "step")
        peak, warmup = 3e-3, [1 / 3, 2 / 3, 1.0]
        assert [row["learning_rate"] for row in steps[:3]] == [peak * factor for factor in warmup]
        assert steps[-1]["learning_rate"] == pytest.approx(0.1 * peak, rel=1e-15)
        assert steps[-1]["loss"] < steps[0]["loss"] < 4
        counts = count_parameters(tiny_run().model)
        assert (result["parameters"], result["gate_parameters"]) == (counts.total, counts.gates)
        assert result["tokens"] == 12 * 4 * 19
        assert result["training_seconds"] == pytest.approx(sum(row["seconds"] for row in steps))
        assert result["peak_share"] == result["tokens_per_second"] * result["flops_per_token_training"] / 1e12
        assert result["loss_spikes"] == 0 and result["loss_spikes_per_10k_steps"] is None

    def test_seconds_of_two_domains_are_not_added_twice(
        self, tmp_path: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = write_corpus(tmp_path / "sinks.jsonl", num_documents=9, word="sink")
        second = f"data.heldout=[{{name: files, path: '{other}', heldout_fraction: 1.0}}]"
        clock = count(0.0)
        monkeypatch.setattr("gatelab.train.loop.time.perf_counter", lambda: next(clock))
        result = train(tiny_text_run(corpus, second), tmp_path / "run", cache)
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "evaluation")
        assert [row["domain"] for row in rows] == ["gates.jsonl", "sinks.jsonl"] * 3
        assert {row["seconds"] for row in rows} == {1} and result["evaluation_seconds"] == 6
        one, two = (figures["perplexity"] for figures in result["heldout"].values())
        assert result["mean_perplexity"] == (one + two) / 2


class TestFinishedRuns:
    def test_a_finished_run_is_returned_without_training(
        self, finished: tuple[Path, dict[str, Any]], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, result = finished
        before, watch = files_of(folder), Recording()

        def refuse(*arguments: object) -> None:
            raise AssertionError("nothing may be built")

        monkeypatch.setattr("gatelab.train.loop.build", refuse)
        assert train(tiny_run(), folder, cache, watch) == result
        assert files_of(folder) == before and watch.starts == watch.messages == []

    def test_it_needs_neither_its_environment_nor_room(
        self, finished: tuple[Path, dict[str, Any]], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, result = finished
        monkeypatch.setattr(run_folder.torch, "__version__", "99.0")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
        assert train(tiny_run(), folder, cache) == result

    def test_other_settings_are_refused_there_too(self, finished: tuple[Path, dict[str, Any]], cache: Path) -> None:
        with pytest.raises(ValueError, match=r"train\.steps: 12 in the folder, 13 now"):
            train(tiny_run("train.steps=13"), finished[0], cache)


class TestRefusals:
    @pytest.mark.parametrize(
        ("override", "shown"),
        [
            ("train.optimizer.learning_rate=0.5", "train.optimizer.learning_rate: 0.003 in the folder, 0.5 now"),
            ("train.seed=3", "train.seed: 0 in the folder, 3 now"),
            ("model.gates.0.activation=silu", "model.gates.0.activation: 'sigmoid' in the folder, 'silu' now"),
            ("data.context=20", "data.context: 19 in the folder, 20 now"),
            ("train.precision=bfloat16", "train.precision: 'float32' in the folder, 'bfloat16' now"),
        ],
    )
    def test_other_settings(self, begun: Path, cache: Path, override: str, shown: str) -> None:
        before = files_of(begun)
        with pytest.raises(ValueError, match="holds a run with other settings; choose another folder") as error:
            train(tiny_run(override), begun, cache)
        assert shown in str(error.value) and str(error.value).count("\n") == 1
        assert files_of(begun) == before

    def test_another_architecture_shows_every_difference(self, begun: Path, cache: Path) -> None:
        with pytest.raises(ValueError) as error:
            train(tiny_run(gate="none", num_layers=3), begun, cache)
        assert "model.num_layers: 2 in the folder, 3 now" in str(error.value)
        assert "model.gates.0.position: 'sdpa_output' in the folder, None now" in str(error.value)

    def test_other_settings_are_refused_before_their_data_is_prepared(
        self, begun: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object) -> None:
            raise AssertionError("no data may be prepared")

        monkeypatch.setattr("gatelab.train.loop.open_source", refuse)
        with pytest.raises(ValueError, match="holds a run with other settings"):
            train(tiny_text_run(corpus), begun, cache)

    def test_other_data_under_the_same_name(self, tmp_path: Path, cache: Path) -> None:
        corpus = write_corpus(tmp_path / "text.jsonl")
        settings = tiny_text_run(corpus)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run", cache, Recording(7))
        write_corpus(corpus, word="sink")
        before = files_of(tmp_path / "run")
        message = "holds a run with other data; restore the text that it was begun with, or choose another folder"
        with pytest.raises(ValueError, match=rf"{message}:\n  fingerprint: '[0-9a-f]{{16}}' in the folder, '[0-9a-f]+"):
            train(settings, tmp_path / "run", cache)
        assert files_of(tmp_path / "run") == before
        write_corpus(corpus)
        train(settings, tmp_path / "run", cache)

    def test_another_environment_unless_allowed(
        self, begun: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run_folder.torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
        with pytest.raises(
            ValueError, match=r"holds a run with other environment; set train.checkpoint.same_env"
        ) as error:
            train(tiny_run(), begun, cache)
        assert "'ABACUS' now" in str(error.value) and "last bits, or choose another folder:" in str(error.value)
        watch = Recording()
        train(tiny_run("train.checkpoint.same_environment=false"), begun, cache, watch)
        assert watch.starts == [5]
        assert json.loads((begun / "environment.json").read_text())["instruction_set"] == "ABACUS"

    def test_another_number_of_threads(self, begun: Path, cache: Path) -> None:
        settings = tiny_run()
        free = settings.model_copy(update={"train": settings.train.model_copy(update={"threads": 2})})
        with pytest.raises(ValueError, match=r"train\.threads: 1 in the folder, 2 now"):
            train(free, begun, cache)

    def test_damaged_records_are_named(self, begun: Path, cache: Path) -> None:
        for name in ("environment.json", "data.json", "settings.yaml"):
            whole = (begun / name).read_text()
            (begun / name).write_text(whole[: len(whole) // 2] + "\x00{")
            with pytest.raises(ValueError, match=f"{name} is unreadable"):
                train(tiny_run(), begun, cache)
            (begun / name).write_text(whole)
        train(tiny_run(), begun, cache)

    def test_a_run_in_the_same_folder(self, begun: Path, cache: Path) -> None:
        code = (
            "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
            "print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(begun / ".lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"another process is training in {begun}; wait for it or choose"):
                train(tiny_run(), begun, cache)
            other.communicate("", timeout=60)
        with FileLock(begun / ".lock"), pytest.raises(ValueError, match="another process is training"):
            train(tiny_run(), begun, cache)
        train(tiny_run(), begun, cache)

    def test_a_disk_too_small_for_the_checkpoints(
        self, tmp_path: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = 3 * 12 * count_parameters(tiny_run().model).total
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, needed - 1))
        with pytest.raises(
            OSError, match="keeping the checkpoints of this run needs about 1 MB but only 1 MB are free"
        ):
            train(tiny_run(), tmp_path / "run", cache)
        assert not (tmp_path / "run").exists()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, needed))
        train(tiny_run(), tmp_path / "run", cache)


class TestResumePolicy:
    def test_auto_begins_where_there_is_nothing(self, tmp_path: Path, cache: Path) -> None:
        watch = Recording()
        train(tiny_run("train.checkpoint.resume=auto"), tmp_path / "new" / "run", cache, watch)
        assert watch.starts == [0] and watch.steps == list(range(1, 13))

    def test_never_refuses_what_is_there(self, begun: Path, tmp_path: Path, cache: Path) -> None:
        settings = tiny_run("train.checkpoint.resume=never")
        with pytest.raises(ValueError, match=r"already holds a run and train.checkpoint.resume is never"):
            train(settings, begun, cache)
        train(settings, tmp_path / "new", cache)

    def test_required_refuses_where_there_is_nothing(self, begun: Path, tmp_path: Path, cache: Path) -> None:
        settings = tiny_run("train.checkpoint.resume=required")
        with pytest.raises(ValueError, match=r"holds no run to continue and train.checkpoint.resume is required; set"):
            train(settings, tmp_path / "new", cache)
        watch = Recording()
        train(settings, begun, cache, watch)
        assert watch.starts == [5]


class TestDivergence:
    def test_a_poisoned_weight_stops_the_run(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = []
        monkeypatch.setattr("gatelab.train.loop.build", lambda *a: built.append(build(*a)) or built[-1])

        class Poison(Recording):
            def update(self, step: int, *figures: float) -> None:
                if step == 7:
                    torch.nn.init.constant_(built[-1][0].model.layers[1].mlp.up_proj.weight, float("nan"))

        with pytest.raises(DivergedError) as error:
            train(tiny_run(), tmp_path / "run", cache, Poison())
        expected = tmp_path / "run" / "checkpoints" / "step_00000005"
        message = (
            f"step 8 has loss nan and gradient_norm nan: training stopped; the last good checkpoint is {expected}. "
        )
        assert str(error.value).startswith(message)
        steps = read_metrics(tmp_path / "run" / "metrics.jsonl", "step")
        assert [row["step"] for row in steps] == list(range(1, 8))
        train(tiny_run(), tmp_path / "run", cache)

    def test_a_huge_rate_names_no_checkpoint_with_the_weights_that_failed(self, tmp_path: Path, cache: Path) -> None:
        """Weights of 1e18 are finite and were saved, and give no finite loss."""
        overrides = ["train.optimizer.learning_rate=1e19", "train.checkpoint.every=1", "train.schedule.warmup_steps=0"]
        with pytest.raises(DivergedError, match=r"step 2 has .*nan.*; there is no checkpoint from before it\. A lower"):
            train(tiny_run(*overrides, qk_norm=False), tmp_path / "run", cache)
        assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1

    @pytest.mark.parametrize(
        ("figure", "message"),
        [
            ("score", "the evaluation on synthetic after step 8 has perplexity inf"),
            ("measure_heldout", "measurement after step 6"),
        ],
    )
    def test_other_figures_stop_it_too(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, figure: str, message: str
    ) -> None:
        calls = []

        def spoiled(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            found = {"score": score, "measure_heldout": measure_heldout}[figure](*arguments, **options)
            if figure == "score" and len(calls) == 2:
                found.nats = 1000.0 * found.num_tokens
            if figure == "measure_heldout" and len(calls) == 3:
                found.layers[0].figures[0].values[0] = float("nan")
            return found

        monkeypatch.setattr(f"gatelab.train.loop.{figure}", spoiled)
        with pytest.raises(DivergedError, match=rf"{message}.*the last good checkpoint is .*step_00000005"):
            train(tiny_run(), tmp_path / "run", cache)

    def test_spikes_are_reported_and_counted(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []

        def spiking(*arguments: Any) -> StepFigures:
            figures = take_step(*arguments)
            calls.append(1)
            return figures._replace(loss=50.0) if len(calls) in (4, 8, 10) else figures

        monkeypatch.setattr("gatelab.train.metrics.SPIKE_FIRST_STEP", 5)
        monkeypatch.setattr("gatelab.train.loop.take_step", spiking)
        watch = Recording()
        result = train(tiny_run(), tmp_path / "run", cache, watch)
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "step")
        assert [row["loss_spikes_live"] for row in rows] == [0] * 7 + [1, 1, 2, 2, 2]
        assert watch.messages == [
            "step 8 has loss 50.000, spike number 1 of this run",
            "step 10 has loss 50.000, spike number 2 of this run",
        ]
        assert result["loss_spikes"] == count_spikes([row["step"] for row in rows], [row["loss"] for row in rows]) == 2
        assert result["loss_spikes_per_10k_steps"] == 2e4 / 7


class TestBuild:
    @pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
    def test_precisions(self, tmp_path: Path, cache: Path, precision: str) -> None:
        settings = tiny_run(f"train.precision={precision}")
        decoder, _ = build(settings, compiled=False)
        wide = torch.float64 if precision == "float64" else torch.float32
        assert {parameter.dtype for parameter in decoder.parameters()} == {wide}
        assert decoder(torch.zeros(1, 3, dtype=torch.long)).dtype == getattr(torch, precision)
        result = train(settings, tmp_path / "run", cache)
        assert result["heldout"]["synthetic"]["loss"] == pytest.approx(3.1, abs=0.3)

    def test_threads_are_those_asked_for_while_it_trains(self, tmp_path: Path, cache: Path) -> None:
        before = torch.get_num_threads()
        seen = []

        class Threads(Recording):
            def update(self, *figures: float) -> None:
                seen.append(torch.get_num_threads())

        train(tiny_run("train.threads=3", "train.steps=3"), tmp_path / "run", cache, Threads())
        assert seen == [3, 3, 3] and torch.get_num_threads() == before
        assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == 3

    def test_deterministic_kernels_are_asked_for_while_it_trains(self, tmp_path: Path, cache: Path) -> None:
        seen = []

        class Mode(Recording):
            def update(self, *figures: float) -> None:
                seen.append(torch.are_deterministic_algorithms_enabled())

        train(tiny_run("train.steps=3"), tmp_path / "one", cache, Mode())
        train(tiny_run("train.steps=3", "train.deterministic=false"), tmp_path / "two", cache, Mode())
        assert seen == [True] * 3 + [False] * 3 and not torch.are_deterministic_algorithms_enabled()

    def test_without_a_compiler_it_runs_eager_and_says_so_once(
        self, finished: tuple[Path, dict[str, Any]], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compilation, "has_cpp_compiler", lambda: False)
        watch = Recording()
        train(tiny_run("train.compile=true"), tmp_path / "run", cache, watch)
        (message,) = watch.messages
        assert message.startswith("Nothing is compiled, because no C++ compiler")
        assert json.loads((tmp_path / "run" / "environment.json").read_text())["compiled"] is False
        shutil.copy(finished[0] / "settings.yaml", tmp_path / "run" / "settings.yaml")
        assert_same_run(tmp_path / "run", finished[0])

    def test_what_compilation_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The compiler that PyTorch will call, and Python's headers; another compiler's presence is no help."""
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr("gatelab.train.parallel.compilation.sysconfig.get_path", lambda name: str(tmp_path))
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.delenv("CXX", raising=False)
        (tmp_path / "Python.h").touch()
        for name in ("clang++", "g++"):
            assert not compilation.has_cpp_compiler()
            (tmp_path / "bin" / name).touch(mode=0o755)
        assert compilation.has_cpp_compiler()
        monkeypatch.setenv("CXX", "my-compiler")
        assert not compilation.has_cpp_compiler()
        monkeypatch.delenv("CXX")
        (tmp_path / "Python.h").unlink()
        assert not compilation.has_cpp_compiler()

    def test_mixtures_and_recomputation_do_not_change_the_loss(self, tmp_path: Path, cache: Path) -> None:
        for name, overrides in {"plain": [], "recomputed": ["train.recompute=true"]}.items():
            train(tiny_run(*overrides, mixture=MIXTURE, gate="sdpa_headwise"), tmp_path / name, cache)
        rows = [
            [(row["loss"], row["gradient_norm"]) for row in read_metrics(tmp_path / name / "metrics.jsonl", "step")]
            for name in ("plain", "recomputed")
        ]
        assert rows[0] == rows[1] and len(rows[0]) == 12


def test_arms_of_a_study_read_the_same_batches(tmp_path: Path, cache: Path) -> None:
    """An identity-start gate leaves the first loss what it is without a gate: same weights, same batch."""
    losses = []
    for gate in ("none", "sdpa_elementwise_identity_start"):
        train(tiny_run("train.steps=4", gate=gate), tmp_path / gate, cache)
        losses.append([row["loss"] for row in read_metrics(tmp_path / gate / "metrics.jsonl", "step")])
    assert losses[0][0] == losses[1][0] and losses[0][3] != losses[1][3]
