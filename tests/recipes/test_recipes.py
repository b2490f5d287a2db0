"""Every recipe is a whole run that can be built, counted, written down and read again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gatelab.gates.variants import VARIANTS
from gatelab.model.accounting import count_parameters, describe_cost
from gatelab.model.decoder import Decoder
from gatelab.model.rivals import RIVALS, find_rival, with_rival
from gatelab.recipes.table import RECIPES, resolve
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise"])
def test_every_recipe_builds_and_its_counts_print(name: str, gate: str) -> None:
    run = resolve(name, [f"gate={gate}"])
    with torch.device("meta"):
        decoder = Decoder(run.model)
    cost = json.loads(json.dumps(describe_cost(run.model, run.data.context, run.train.recompute)))
    assert cost["parameters"] == sum(parameter.numel() for parameter in decoder.parameters()) > 0
    assert (cost["gate_parameters"] > 0) == (gate != "none")
    assert 0 < cost["active_parameters"] <= cost["parameters"] and cost["flops_per_token"] > 0
    assert (RECIPES[name].__doc__ or "").strip()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_written_and_read_as_yaml(name: str) -> None:
    run = resolve(name, ["gate=sdpa_and_value", "match=parameters"])
    assert RunSettings.from_yaml(run.to_yaml()) == run


@pytest.mark.parametrize("gate", VARIANTS)
@pytest.mark.parametrize("name", ["demo", "dense_tiny", "moe_tiny"])
@pytest.mark.parametrize("match", ["none", "parameters", "active"])
def test_every_gate_goes_with_every_small_recipe(name: str, gate: str, match: str) -> None:
    """Matched arms have the baseline's parameters, up to what one multiple of the feed-forward's width holds."""
    run, baseline = resolve(name, [f"gate={gate}", f"match={match}"]), resolve(name)
    assert run.model.gates == VARIANTS[gate].gates and run.model.control == VARIANTS[gate].control
    assert run.data == baseline.data and run.train == baseline.train
    if match == "none":
        return
    experts = run.model.mixture.num_experts if run.model.mixture else 1
    step = 8 * 3 * run.model.width * run.model.num_layers * experts
    excess = count_parameters(run.model).total - count_parameters(baseline.model).total
    if match == "parameters":
        assert 0 <= excess < step


def test_latent_tiny_goes_with_every_gate_that_stands_behind_its_norms() -> None:
    baseline = resolve("latent_tiny")
    step = 8 * 3 * baseline.model.width * baseline.model.num_layers
    for name, variant in VARIANTS.items():
        words = [f"gate={name}", "match=parameters"]
        if any(gate.placement == "before_norm" for gate in variant.gates):
            with pytest.raises(ValueError, match="placement=before_norm does not go with latent attention"):
                resolve("latent_tiny", words)
        else:
            matched = count_parameters(resolve("latent_tiny", words).model).total
            assert 0 <= matched - count_parameters(baseline.model).total < step
    with pytest.raises(ValueError, match=r"sink\.kind=learned_logit does not go with latent attention"):
        resolve("latent_tiny", ["rival=learned_logit"])


@pytest.mark.parametrize(
    "words", [["model.gates.0.layers=[0]"], ["model.gates.0.rank=8"], ["model.num_heads=8"], ["model.num_layers=3"]]
)
def test_matching_comes_after_every_other_word(words: list[str]) -> None:
    """What the words make of the model and its gates is what the feed-forward pays for."""
    baseline = resolve("dense_tiny", [word for word in words if "gates" not in word])
    gated = resolve("dense_tiny", ["match=parameters", *words, "gate=sdpa_elementwise"])
    step = 8 * 3 * gated.model.width * gated.model.num_layers
    assert 0 <= count_parameters(gated.model).total - count_parameters(baseline.model).total < step


@pytest.mark.parametrize("rival", RIVALS)
def test_every_rival_goes_with_recipes_and_other_words(rival: str) -> None:
    words = ["model.num_layers=3", f"rival={rival}", "match=parameters", "gate=sdpa_headwise"]
    run, plain = resolve("dense_tiny", words), resolve("dense_tiny", [words[0], *words[2:]])
    assert run.model == with_rival(plain.model, find_rival(rival))
    assert (run.data, run.train) == (plain.data, plain.train)


def test_a_path_stands_over_the_rivals_word() -> None:
    run = resolve("backcopy", ["rival=learned_logit", "model.sink.kind=off_by_one"])
    assert run.model.sink is not None and run.model.sink.kind == "off_by_one"


@pytest.mark.parametrize("name", RECIPES)
def test_words_and_arguments_of_a_recipe_mean_the_same(name: str) -> None:
    words = ["gate=sdpa_elementwise", "match=active"]
    assert resolve(name, words) == RECIPES[name](gate="sdpa_elementwise", match="active")


def test_a_word_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="gate is given twice; once is possible"):
        resolve("demo", ["gate=none", "gate=sdpa_headwise"])


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["paper_dense_28l"], 1_720_837_120),
        (["paper_dense_28l", "gate=sdpa_headwise"], 1_721_754_624),
        (["paper_dense_28l", "gate=sdpa_elementwise", "match=parameters"], 1_728_177_152),
        (["paper_dense_48l"], 1_705_932_288),
        (["paper_moe_15a2b"], 15_577_227_264),
        (["paper_moe_15a2b", "gate=sdpa_elementwise"], 15_577_227_264 + 24 * 2048 * 4096),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_counts_are_those_published(words: list[str], parameters: int) -> None:
    assert count_parameters(resolve(words[0], words[1:]).model).total == parameters


def test_the_papers_training_is_its_own() -> None:
    """100,000 steps of 1,024 sequences of 4,096 tokens: 419 billion."""
    dense, mixture = resolve("paper_dense_28l"), resolve("paper_moe_15a2b")
    for run in (dense, mixture):
        assert run.tokens_per_step * run.train.steps == 419_430_400_000 and run.train.schedule.warmup_steps == 1000
    assert (dense.train.optimizer.learning_rate, mixture.train.optimizer.learning_rate) == (4e-3, 2e-3)
    assert mixture.train.optimizer.learning_rate * mixture.train.schedule.final_fraction == pytest.approx(3e-5)


def test_overrides_reach_every_part() -> None:
    words = [
        "gate=sdpa_headwise",
        "train.optimizer.learning_rate=3e-4",
        "model.gates.0.activation=silu",
        "data.context=100",
    ]
    run = resolve("dense_tiny", words)
    assert run.train.optimizer.learning_rate == 3e-4 and run.data.context == 100
    assert run.model.gates[0].activation == "silu" and run.model.gates[0].granularity == "headwise"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["dense_tny"],
            r"^recipe 'dense_tny' is unknown; did you mean 'dense_tiny'\? the choices are: demo, dense_tiny, ",
        ),
        (
            ["xyz"],
            r"^recipe 'xyz' is unknown; the choices are: demo, dense_tiny, moe_tiny, latent_tiny, encoder_tiny, ",
        ),
        (
            ["demo", "gate=sdpa_elementwize"],
            r"'sdpa_elementwize' is unknown; did you mean 'sdpa_elementwise'\? the choices",
        ),
        (
            ["demo", "rival=learnt_logit"],
            r"rival 'learnt_logit' is unknown; did you mean 'learned_logit'\? the choices",
        ),
        (
            ["demo", "match=parameter"],
            r"match cannot be 'parameter'; did you mean 'parameters'\? the choices are: none, ",
        ),
        (
            ["demo", "gates=none"],
            r"'gates' is no word for recipe demo; did you mean 'gate'\? the choices are: gate, rival, match",
        ),
        (
            ["demo", "steps=5"],
            r"'steps' is no word for recipe demo; the choices are: gate, rival, match, .*model\., data\., ",
        ),
        (["demo", "train.step=5"], r"'train.step' is unknown: train has no field 'step'; did you mean 'steps'\?"),
        (["demo", "train.optimiser.learning_rate=5"], r"train has no field 'optimiser'; did you mean 'optimizer'\?"),
        (
            ["demo", "train.precision=bfloat"],
            r"precision cannot be 'bfloat'; did you mean 'bfloat16'\? the choices are",
        ),
        (["demo", "train.steps=many"], r"train\.steps cannot be 'many'"),
        (["demo", "train.steps=0"], r"train\.steps cannot be 0: input should be greater than 0"),
        (["dense_tiny", "data.context=300"], r"data\.context=300 exceeds model\.max_context=256"),
        (
            ["dense_tiny", "model.vocab_size=500"],
            r"model\.vocab_size=500 is smaller than the data's vocabulary of 2048",
        ),
        (["backcopy", "model.vocab_size=66"], r"model\.vocab_size=66 is smaller than the data's vocabulary of 67"),
        (["dense_tiny", "model.num_kv_heads=3"], r"num_heads=4 is not divisible by num_kv_heads=3"),
        (["dense_tiny", "train.accumulation=3"], r"sequences_per_step=8 is not divisible by accumulation=3"),
        (["dense_tiny", "train.steps=10"], r"schedule\.warmup_steps=30 .* exceed steps=10"),
        (["demo", "train.steps"], r"^'train\.steps' is not an assignment: write key=value"),
        (["demo", "train.steps=[1"], r"'train\.steps=\[1' is not readable as YAML"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_the_nearest_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(words[0], words[1:])


def test_a_file_of_settings_is_a_recipe(tmp_path: Path) -> None:
    """As it stands, with its gates; with words, which change only what they name."""
    run, file = resolve("dense_tiny", ["gate=sdpa_headwise", "match=parameters", "train.seed=3"]), tmp_path / "my.yaml"
    file.write_text(run.to_yaml())
    assert resolve(str(file)) == run
    assert resolve(str(file), ["train.seed=4"]) == run.with_overrides(["train.seed=4"])
    assert resolve(str(file), ["gate=none"]).model.gates == ()
    file.write_text("model: [")
    with pytest.raises(ValueError, match=r"my\.yaml holds no settings of a run: "):
        resolve(str(file))
    with pytest.raises(ValueError, match=r"other\.yaml can't be read: No such file or directory; name a recipe or"):
        resolve(str(tmp_path / "other.yaml"))


def test_recipes_load_without_torch() -> None:
    """So that listings and settings are printed at once."""
    use = "import sys, gatelab.recipes.table as table; table.resolve('moe_tiny', ['gate=value_headwise'])"
    command = [sys.executable, "-c", f"{use}; print('torch' in sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "False\n"


def test_settings_saved_by_a_run_give_the_same_bits(tmp_path: Path) -> None:
    words = ["gate=sdpa_elementwise", "train.steps=6", "train.schedule.warmup_steps=2", "train.sequences_per_step=3"]
    small = ["model.width=24", "model.head_size=10", "model.feedforward_width=40", "train.threads=1"]
    train(resolve("backcopy", words + small), tmp_path / "first", tmp_path / "cache")
    saved = RunSettings.from_yaml((tmp_path / "first" / "settings.yaml").read_text())
    train(saved, tmp_path / "second", tmp_path / "cache")
    first, second = (
        load_file(RunFolder(tmp_path / name).checkpoints / "step_00000006" / "model.safetensors")
        for name in ("first", "second")
    )
    assert len(first) > 5 and all(torch.equal(first[name], second[name]) for name in first)
