"""Every preset at every scale: it can be built, its arms differ by what they declare, and it is the paper's table."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from gatelab.data.settings import MaskingSettings
from gatelab.gates.variants import VARIANTS
from gatelab.model.accounting import count_parameters
from gatelab.model.decoder import Decoder
from gatelab.model.settings import LatentSettings
from gatelab.recipes.table import resolve
from gatelab.settings import difference
from gatelab.study.conditions import common_weights
from gatelab.study.jobs import comparison_jobs
from gatelab.study.presets import (
    LEFT_OUT,
    PAPER_NUMBERS,
    PRESETS,
    command_that_leaves,
    find_preset,
    paper_difference,
    plan,
)
from gatelab.study.presets.arms import run_of, uniform_floor
from gatelab.study.scales import SCALES, find_scale
from gatelab.study.study import Arm, Study
from gatelab.train.checkpoint import path_of_step

REFUSED = {
    *((preset, "mechanism") for preset in ("paper/sinks", "open/sft", "open/why", "open/encoder_text")),
    *(("mechanism", scale) for scale in SCALES if scale != "mechanism"),
    *(("open/encoder_vision", scale) for scale in SCALES if scale not in ("micro", "mini")),
}
PAIRS = [(preset, scale) for preset in PRESETS for scale in SCALES if (preset, scale) not in REFUSED]
OF_WORD = {
    "gate": ("model.gates", "model.control"),
    "match": ("model.feedforward_width", "model.mixture.expert_width", "model.drawn_feedforward_width"),
    "rival": ("model.sink", "model.sandwich_norm"),
}
PAPER_MAP = Path(__file__).parents[2] / "docs" / "paper_map.md"


@cache
def study_of(preset: str, scale: str) -> Study:
    return find_preset(preset)(find_scale(scale))


@cache
def parameters_of(preset: str, scale: str) -> dict[str, int]:
    study = study_of(preset, scale)
    return {arm.name: count_parameters(study.settings_of(arm).model).total for arm in study.arms}


def is_matched(arm: Arm) -> bool:
    return "match=parameters" in arm.assignments


@pytest.mark.parametrize(("preset", "scale"), PAIRS)
def test_every_arm_builds(preset: str, scale: str) -> None:
    study = study_of(preset, scale)
    assert study.scale == scale and study.question.endswith("?")
    assert Study.from_yaml(study.to_yaml()) == study
    for arm in study.arms:
        with torch.device("meta"):
            assert next(Decoder(study.settings_of(arm).model).parameters()).is_meta


@pytest.mark.parametrize(("preset", "scale"), PAIRS)
def test_arms_differ_exactly_by_what_they_declare(preset: str, scale: str) -> None:
    study = study_of(preset, scale)
    baseline = study.settings_of(study.arm(study.baseline))
    assert study.arm(study.baseline).assignments == ()
    for arm in study.arms[1:]:
        found = difference(baseline, study.settings_of(arm))
        declared = [OF_WORD.get(word.split("=")[0], (word.split("=")[0],)) for word in arm.assignments]
        assert found and all(path.startswith(sum(declared, ())) for path in found), (arm.name, found)
        for paths in declared:
            costs_less_than_a_multiple = paths == OF_WORD["match"] and "gate=sdpa_headwise" in arm.assignments
            assert any(path.startswith(paths) for path in found) or costs_less_than_a_multiple, (arm.name, paths)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_all_arms_start_from_the_same_weights(preset: str) -> None:
    study = study_of(preset, "mechanism" if preset == "mechanism" else "micro").model_copy(update={"seeds": (0,)})
    num_common, digests = common_weights(study)
    different = [name for name, digest in digests.items() if digest != digests[study.baseline]]
    assert num_common > 50_000
    assert all("init_std" in "".join(study.arm(name).assignments) for name in different), different


@pytest.mark.parametrize(("preset", "scale"), PAIRS)
def test_matched_arms_have_the_baselines_parameters(preset: str, scale: str) -> None:
    study, parameters = study_of(preset, scale), parameters_of(preset, scale)
    limit = 0.009 if scale == "paper" else 0.005
    ungated_twins = dict(one.changed for one in study.interactions)
    for arm in study.arms:
        if is_matched(arm) or "rival" in "".join(arm.assignments):
            twin = ungated_twins.get(arm.name, study.baseline)
            assert 0 <= parameters[arm.name] / parameters[twin] - 1 < limit, arm.name


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"paper/moe", "paper/overhead"}))
def test_gates_are_matched_unless_their_name_says_otherwise(preset: str) -> None:
    study = study_of(preset, "mechanism" if preset == "mechanism" else "mini")
    gates = [arm for arm in study.arms if any(word.startswith("gate=") for word in arm.assignments)]
    assert gates or preset == "paper/sinks"
    assert all(is_matched(arm) != arm.name.endswith("_with_surplus") for arm in gates)


@pytest.mark.parametrize(("preset", "scale"), sorted(REFUSED))
def test_a_preset_that_does_not_go_with_a_scale_is_refused(preset: str, scale: str) -> None:
    with pytest.raises(ValueError, match=rf"^preset {preset} .* scale {scale} .*(choose a larger|use) scale"):
        find_preset(preset)(find_scale(scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", ["variants", "dense", "deep", "mixture"])
def test_runs_of_a_scale_read_its_tokens(scale: str, shape: str) -> None:
    run = run_of(SCALES[scale], shape)
    assert 0 <= SCALES[scale].tokens - run.train.steps * run.tokens_per_step < run.tokens_per_step
    assert (run.model.mixture is not None) == (shape == "mixture" or (scale, shape) == ("paper", "variants"))


@pytest.mark.parametrize(("scale", "millions"), [("micro", 1), ("mini", 4), ("small", 35)])
def test_models_of_a_scale_have_its_size(scale: str, millions: float) -> None:
    for shape in ("dense", "deep", "mixture"):
        counts = count_parameters(run_of(SCALES[scale], shape).model)
        assert (counts.active - counts.embedding) / 1e6 == pytest.approx(millions, rel=0.15)
    mixture = run_of(SCALES[scale], "mixture").model.mixture
    assert mixture is not None and mixture.expert_width % 8 == 0


@pytest.mark.parametrize(
    "row", [row for row in PAPER_NUMBERS if row.startswith("T1") and row not in ("T1 r1", "T1 r4")]
)
def test_arms_with_surplus_add_what_the_paper_says(row: str) -> None:
    """Row 4 adds 453 million by the paper's sizes, not its 400."""
    arms = [arm for name in PRESETS if name.startswith("paper/") for arm in study_of(name, "paper").arms]
    words = next(arm.assignments for arm in arms if arm.paper == row)
    unmatched = resolve("paper_moe_15a2b", [word for word in words if word != "match=parameters"])
    added = count_parameters(unmatched.model).total - count_parameters(resolve("paper_moe_15a2b").model).total
    assert added / 1e6 == pytest.approx(PAPER_NUMBERS[row].added_millions, rel=0.03, abs=0.04)


def test_every_published_row_is_redone_or_said_to_be_elsewhere() -> None:
    redone = {arm.paper for name in PRESETS if name.startswith("paper/") for arm in study_of(name, "paper").arms}
    assert redone - {None} <= PAPER_NUMBERS.keys()
    missing = {row for row in PAPER_NUMBERS if row not in redone and not row.startswith("T6")}
    assert missing == {"T2 r6", "T2 r10"}, "the rows at the doubled rate lie on stability's curve"


def test_rows_of_one_variant_agree_between_the_tables() -> None:
    for name, variant in list(VARIANTS.items())[1:]:
        rows = re.findall(r"T1 r\d+", variant.origin)
        arms = [arm for preset in PRESETS if preset.startswith("paper/") for arm in study_of(preset, "paper").arms]
        same = {arm.paper for arm in arms if f"gate={name}" in arm.assignments and arm.paper and arm.paper[1] in "134"}
        assert set(rows) <= same and len({PAPER_NUMBERS[row].perplexity for row in same}) <= 1, name


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("paper/")])
def test_arms_stand_beside_the_row_of_their_own_method(name: str) -> None:
    for arm in study_of(name, "paper").arms:
        if arm.paper is None or not arm.paper.startswith("T2"):
            continue
        method, words = PAPER_NUMBERS[arm.paper].method, " ".join(arm.assignments)
        assert ("baseline" in method) == ("gate=" not in words) and ("sandwich" in method) == ("sandwich" in words)
        assert ("headwise" in method) == ("headwise" in words)
        assert ("8e-3" in method) == ("high_rate" in arm.name or arm.name == "sandwich_norm")


def test_differences_of_the_paper() -> None:
    assert paper_difference("T1 r5", "T1 r1") == pytest.approx(-0.0450, abs=5e-5)
    assert paper_difference("T2 r10", "T2 r8") == pytest.approx(+0.0051, abs=5e-5)
    assert paper_difference("T2 r12", "T2 r11") is None


def test_surplus_arms_stand_beside_matched_ones() -> None:
    names = [arm.name for arm in study_of("paper/positions", "micro").arms]
    assert names[:5] == [
        "ungated", "more_kv_heads", "more_query_heads", "sdpa_elementwise", "sdpa_elementwise_with_surplus",
    ]  # fmt: skip
    parameters = parameters_of("paper/positions", "micro")
    assert parameters["more_query_heads"] == parameters["sdpa_elementwise_with_surplus"] > parameters["ungated"]
    experts = [study_of("paper/moe", scale).settings_of(study_of("paper/moe", scale).arm("more_experts")).model.mixture
               for scale in ("micro", "paper")]  # fmt: skip
    assert [mixture.num_experts for mixture in experts] == [33, 132]


@pytest.mark.parametrize("scale", SCALES)
def test_confirmatory_studies_are_few_and_have_a_difference_that_matters(scale: str) -> None:
    studies = {name: one(find_scale(scale)) for name, one in PRESETS.items() if (name, scale) not in REFUSED}
    confirmatory = {name: study for name, study in studies.items() if study.confirmatory}
    of_open_questions = {f"open/{name}" for name in ("quantisation", "encoder_text", "encoder_vision", "sft")}
    declared = {"paper/dense", "mechanism"} | of_open_questions
    assert set(confirmatory) == declared & set(studies)
    assert all(len(study.seeds) == 5 for study in confirmatory.values())
    of_sinks = {"mechanism", "open/sft"}
    assert {confirmatory[name].smallest_difference for name in set(confirmatory) - of_sinks} == {0.01}
    assert confirmatory["paper/dense"].metric == "heldout_loss"


def test_a_difference_in_first_token_attention_matters_from_one_floor_on() -> None:
    assert uniform_floor(1) == 1 and uniform_floor(2) == 0.75
    study = study_of("paper/sinks", "mini")
    assert study.metric == "first_token_attention"
    assert study.smallest_difference == pytest.approx(0.0133, abs=5e-5)


def test_levers_keep_the_tokens() -> None:
    """Longer windows come in smaller batches, so that no lever is a longer training."""
    study = study_of("paper/sinks", "micro")
    runs = [study.settings_of(arm) for arm in study.arms]
    assert len({run.tokens_per_step * run.train.steps for run in runs}) == 1
    assert {run.data.context for run in runs} == {128, 256, 512}


def test_the_large_batches_have_the_papers_proportions() -> None:
    """3.5T and 1T tokens against 400B, which are 100,000 steps in batches of 1,024."""
    for name, steps, batch, rate in (
        ("paper/dense_large_batch", 437_500, 2048, 4.5e-3),
        ("paper/dense_deep_large_batch", 62_500, 4096, 5.3e-3),
    ):
        train = study_of(name, "paper").settings_of(study_of(name, "paper").arms[0]).train
        assert (train.steps, train.sequences_per_step, train.optimizer.learning_rate) == (steps, batch, rate)
    high = study_of("paper/dense_deep_large_batch", "paper").settings_of(
        study_of("paper/dense_deep_large_batch", "paper").arm("ungated_high_rate")
    )
    assert high.train.optimizer.learning_rate == 8e-3


def test_fine_tuning_starts_from_the_runs_that_pretraining_leaves() -> None:
    """Folder, step and model of each arm's and seed's start, and the words that a reader may change."""
    for scale in ("micro", "paper"):
        study, pretraining = study_of("open/sft", scale), study_of("open/quantisation", scale)
        folder = Path("runs/study") / f"{pretraining.name}-{pretraining.scale}"
        before = {(job.arm, job.seed): job for job in comparison_jobs(pretraining)}
        after = {(job.arm, job.seed): job for job in comparison_jobs(study)}
        assert before.keys() == after.keys()
        for key, job in after.items():
            run, start = job.settings, before[key]
            assert run.train.start_from == str(
                path_of_step(folder / start.folder / "checkpoints", start.settings.train.steps)
            )
            assert run.model == start.settings.model
            assert run.data.chats is not None and run.data.chats.path == "chats.jsonl"
            assert run.data.tokenizer.path == f"{folder}/ungated/seed_0/tokenizer.json"
            assert run.train.evaluation.measured_windows == run.train.evaluation.final_measured_windows
    changed = study_of("open/sft", "micro").changed(["data.chats.path=mine.jsonl", "data.chats.too_long=cut"])
    chats = changed.settings_of(changed.arms[1]).data.chats
    assert chats is not None and (chats.path, chats.too_long) == ("mine.jsonl", "cut")


def test_shares_of_hidden_tokens_can_be_set() -> None:
    changed = study_of("open/encoder_text", "micro").changed(["data.masking.probability=0.3"])
    assert all(changed.settings_of(arm).data.masking == MaskingSettings(probability=0.3) for arm in changed.arms)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("runs/study/granularity-small/ungated/seed_0", "gatelab study paper/granularity --scale small"),
        ("runs/study/mechanism-mechanism", "gatelab study mechanism --scale mechanism"),
        ("runs/study/granularity-huge/ungated", None),
        ("runs/study/mine-small/ungated", None),
        ("runs/granularity-small/ungated", None),
        ("runs/study", None),
    ],
)
def test_what_a_preset_leaves_is_known_by_its_folder(path: str, command: str | None) -> None:
    assert command_that_leaves(Path(path)) == command


def test_kinds_of_attention_have_equal_parameters_and_the_caches_they_are_known_for() -> None:
    study, parameters = study_of("open/attention_kinds", "micro"), parameters_of("open/attention_kinds", "micro")
    kinds = ("grouped", "multi_head", "multi_query", "latent")
    assert list(parameters) == [f"{kind}{gate}" for kind in kinds for gate in ("", "_headwise", "_elementwise")]
    assert all(0 <= count / parameters["grouped"] - 1 < 0.005 for count in parameters.values())
    models = {arm.name: study.settings_of(arm).model for arm in study.arms}
    assert [models[kind].num_kv_heads for kind in kinds] == [2, 4, 1, 4]
    assert [models[kind].latent is None for kind in kinds] == [True, True, True, False]
    assert models["latent"].latent == LatentSettings(
        key_value_rank=32, unrotated_size=32, rotated_size=16, value_size=32
    )
    for kind in kinds:
        plain, headwise, elementwise = (models[f"{kind}{gate}"] for gate in ("", "_headwise", "_elementwise"))
        assert not plain.gates and elementwise.gates == VARIANTS["sdpa_elementwise"].gates
        assert headwise.gates == VARIANTS["sdpa_headwise"].gates
        assert elementwise.feedforward_width == plain.feedforward_width - 42
    assert {one.name: one.changed + one.plain for one in study.interactions} == {
        f"{kind}_{gate}": (f"{kind}_{gate}", kind, f"grouped_{gate}", "grouped")
        for kind in kinds[1:]
        for gate in ("headwise", "elementwise")
    }
    paper = study_of("open/attention_kinds", "paper")
    latent = paper.settings_of(paper.arm("latent")).model.latent
    assert latent == LatentSettings(key_value_rank=512, unrotated_size=128, rotated_size=64, value_size=128), "V2-Lite"


def test_what_a_gate_owes_to_other_choices_is_asked_in_pairs() -> None:
    """The arms of tables 3 and 4 at the SDPA output, the identity, and three changes to an ungated and a gated arm."""
    study = study_of("open/why", "micro")
    gates = {word for arm in study.arms for word in arm.assignments if word.startswith("gate=")}
    of_tables = {
        arm.assignments[0]
        for name in ("nonlinearity", "sparsity")
        for arm in study_of(f"paper/{name}", "micro").arms[1:]
    }
    assert gates == (of_tables - {"gate=value_elementwise", "gate=sdpa_head_shared"}) | {"gate=sdpa_identity"}
    assert (len(study.arms), study.metric, study.seeds) == (16, "heldout_loss", (0, 1, 2))
    changes = {"qk_norm_off": "model.qk_norm", "bos_off": "data.bos_in_every_window"}
    changes["weight_decay_0"] = "train.optimizer.weight_decay"
    assert [one.name for one in study.interactions] == list(changes)
    for one in study.interactions:
        assert one.plain == ("sdpa_elementwise", "ungated")
        for arm, plain in zip(one.changed, one.plain, strict=True):
            found = difference(study.settings_of(study.arm(plain)), study.settings_of(study.arm(arm)))
            assert list(found) == [changes[one.name]], arm
    assert [one.name for one in study_of("open/why", "paper").interactions][1] == "bos_on"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"preset 'paper/position' is unknown; did you mean 'paper/positions'\?"):
        find_preset("paper/position")
    with pytest.raises(
        ValueError, match=r"scale 'mikro' is unknown; did you mean 'micro'\? the choices are: mechanism"
    ):
        find_scale("mikro")
    with pytest.raises(ValueError, match=r"^preset paper/switch_heads is left out: table 6 needs Switch-Head"):
        find_preset("paper/switch_heads")


def test_the_map_names_every_preset_and_every_row() -> None:
    text = PAPER_MAP.read_text(encoding="utf-8")
    commands = re.findall(r"gatelab study ([\w/]+)(?: --scale (\w+))?", text)
    assert {name for name, _ in commands} == PRESETS.keys()
    assert {scale for _, scale in commands if scale} <= SCALES.keys()
    assert all(name in text for name in (*LEFT_OUT, *SCALES))
    for table, rows in re.findall(r"^\| table (\d)[^|]*\| ([\d, ]+) \| `gatelab study [\w/]+` \|", text, re.MULTILINE):
        assert all(f"T{table} r{row.strip()}" in PAPER_NUMBERS for row in rows.split(","))


def test_a_study_is_planned_by_name_or_from_a_file(tmp_path: Path) -> None:
    assert plan("rivals") == find_preset("rivals")(SCALES["micro"])
    assert plan("mechanism").scale == "mechanism"
    changed = plan("rivals", "mini").changed(["train.steps=3000"], num_seeds=2)
    assert changed.seeds == (0, 1) and changed.assignments[-1] == "train.steps=3000"
    (tmp_path / "study.yaml").write_text(changed.to_yaml())
    assert plan(str(tmp_path / "study.yaml")) == changed
    with pytest.raises(ValueError, match="has its own scale; leave out --scale mini"):
        plan(str(tmp_path / "study.yaml"), "mini")
    with pytest.raises(ValueError, match=r"other.yaml does not exist; give the study.yaml in a study's folder, or a"):
        plan("other.yaml")
    with pytest.raises(ValueError, match="confirmatory"):
        plan("mechanism").changed(num_seeds=3)
