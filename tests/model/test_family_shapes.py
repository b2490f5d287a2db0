"""What layers of other families need, against loops: windows, biases, centred norms, sigmoid routers, own shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_by_loops import decoder_by_loops
from tiny_decoders import ARCHITECTURES, FAMILIES, MIXTURE, SINKS, V, tiny_decoder, tiny_settings, token_ids

from gatelab.diagnose.measure import measure
from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import find_variant
from gatelab.model.accounting import count_parameters, flops_per_token_forward
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.matching import with_gate
from gatelab.model.settings import LayerSettings, MixtureSettings, ModelSettings, RopeSettings

IDS = token_ids(num_rows=2, num_tokens=11)


@pytest.mark.parametrize("name", ["dense", "mixture", "sandwich norm", "partial rotary", *FAMILIES, *SINKS])
def test_logits_and_all_gradients_equal_loops(name: str) -> None:
    decoder = tiny_decoder(ARCHITECTURES[name])
    logits, expected = decoder(IDS), decoder_by_loops(decoder, IDS)
    assert expected.std() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    names, wanted = zip(*decoder.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(one, wanted, upstream) for one in (logits, expected))
    for parameter, actual, wished in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(actual, wished, rtol=1e-8, atol=1e-8, msg=lambda m: f"{parameter}: {m}")  # noqa: B023


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"biased_projections": ("q", "k")}),
    ("qwen3-next", {"centred_norms": False}),
    ("qwen3-next", {"mixture": MIXTURE}),
    ("afmoe", {"embedding_scale": 1.0}),
    ("afmoe", {"layers.0.window": 6}),
    ("afmoe", {"layers.1.rotary": True}),
    ("afmoe", {"mixture.router": "softmax"}),
    ("afmoe", {"mixture.selection_bias": False}),
    ("afmoe", {"mixture.routed_scale": 1.0}),
    ("laguna", {"layers.0.rope.base": 8000.0}),
    ("laguna", {"layers.0.rope.fraction": 1.0}),
    ("laguna", {"gates.0.activation": "sigmoid"}),
    ("step", {"mixture.renormalize": True}),
]


@pytest.mark.parametrize(
    ("family", "change"), CHANGES, ids=lambda value: value if isinstance(value, str) else str(value)
)
@torch.no_grad()
def test_each_option_matters(family: str, change: dict[str, Any]) -> None:
    """The same weights under other settings give other logits."""
    settings = FAMILIES[family]
    changed = settings.to_mapping()
    for path, value in change.items():
        *parents, last = path.split(".")
        node: Any = changed
        for part in parents:
            node = node[int(part) if part.isdecimal() else part]
        node[last] = value.to_mapping() if isinstance(value, MixtureSettings) else value
    decoder, other = tiny_decoder(settings), Decoder(ModelSettings.parse(changed)).double()
    other.load_state_dict(decoder.state_dict(), strict=False)
    assert (decoder(IDS) - other(IDS)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["afmoe", "laguna", "step"])
@torch.no_grad()
def test_a_window_wider_than_the_sequence_hides_nothing(name: str) -> None:
    settings = FAMILIES[name]

    def with_window(window: int | None) -> Decoder:
        layers = tuple(layer.model_copy(update={"window": window}) for layer in settings.layers)
        decoder = Decoder(settings.model_copy(update={"layers": layers})).double()
        decoder.load_state_dict(tiny_decoder(settings).state_dict())
        return decoder

    wide, free = with_window(IDS.shape[1]), with_window(None)
    assert torch.equal(wide(IDS), free(IDS))
    narrow = tiny_decoder(settings)
    shortest = min(layer.window or V for layer in settings.layers)
    assert torch.equal(narrow(IDS[:, :shortest]), free(IDS[:, :shortest]))
    assert (narrow(IDS)[:, shortest:] - free(IDS)[:, shortest:]).abs().amax(-1).min() > 1e-6


@torch.no_grad()
def test_decoding_token_by_token_forgets_what_left_the_window() -> None:
    """With windows alone a change can reach no further than the windows of all layers together."""
    settings = tiny_settings(layers=(LayerSettings(window=3), LayerSettings(window=4)))
    decoder, ids = tiny_decoder(settings), token_ids(num_tokens=12)
    changed = ids.clone()
    changed[:, 2] = (ids[:, 2] + 1) % V
    outputs = []
    for tokens in (ids, changed):
        cache = KVCache(settings.num_layers)
        outputs.append(torch.cat([decoder(token, cache=cache) for token in tokens.split(1, dim=1)], 1))
    moved = (outputs[0] - outputs[1]).abs().amax((0, 2)) > 1e-9
    assert moved.tolist() == [2 <= t <= 2 + 2 + 3 for t in range(12)]


@pytest.mark.compile
@torch.no_grad()
def test_layers_of_their_own_keep_a_decoder_in_one_graph() -> None:
    settings = FAMILIES["laguna"].model_copy(update={"mixture": None})
    decoder = tiny_decoder(settings, torch.float32)
    assert torch.equal(torch.compile(decoder, backend="eager", fullgraph=True)(IDS), decoder(IDS))


@pytest.mark.parametrize("name", ["afmoe", "laguna", "step"])
@pytest.mark.parametrize("hidden", ["nothing", "padding", "documents"])
def test_measured_windows_equal_full_maps(name: str, hidden: str) -> None:
    """First-token attention of every head, with its floor, from maps that are built entry by entry."""
    settings, ids = FAMILIES[name], token_ids(num_rows=2, num_tokens=11)
    decoder = tiny_decoder(settings)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 8 + [1] * 3]) if hidden == "documents" else None
    real = torch.tensor([[True] * 11, [True] * 7 + [False] * 4]) if hidden == "padding" else None
    found = measure(decoder, ids, padding_mask=real, documents=documents)
    assert [layer.layer for layer in found.layers] == list(range(settings.num_layers))
    numbers = torch.zeros_like(ids) if documents is None else documents
    numbers = numbers if real is None else torch.where(real, numbers, -1)
    for layer, measured in zip(settings.layers, found.layers, strict=True):
        shares, floors = first_token_shares(decoder, ids, numbers, measured.layer, layer.window)
        assert measured.by_head("first_real_key_attention") == pytest.approx(shares, rel=1e-9)
        assert measured.floor("first_real_key_attention") == pytest.approx(floors, rel=1e-9)


def first_token_shares(
    decoder: Decoder, ids: torch.Tensor, numbers: torch.Tensor, layer: int, window: int | None
) -> tuple[list[float], float]:
    """Mean attention to the first token of the query's document over the queries that see it, and 1 / visible keys."""
    kept: dict[str, torch.Tensor] = {}

    class Keep:
        def record(self, layer: int, tensors: dict[str, torch.Tensor], scores: object) -> None:
            kept.update(tensors)

    attention = decoder.model.layers[layer].self_attn
    attention.recorder = Keep()
    with torch.no_grad():
        decoder(ids, numbers)
    attention.recorder = None
    query, key = kept["query"], kept["key"]
    group, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
    shares, evens = [[] for _ in range(query.shape[2])], []
    for b, row in enumerate(numbers.tolist()):
        for t, number in enumerate(row):
            seen = [s for s in range(t + 1) if row[s] == number and (window is None or t - s < window)]
            if number == -1 or row.index(number) not in seen:
                continue
            evens.append(1 / len(seen))
            for h, heads in enumerate(shares):
                logits = torch.stack([scale * query[b, t, h] @ key[b, s, h // group] for s in seen])
                heads.append((logits[0] - logits.logsumexp(0)).exp().item())
    return [sum(heads) / len(heads) for heads in shares], sum(evens) / len(evens)


def test_parameters_are_counted_layer_by_layer() -> None:
    """By hand: embedding and final norm; then each layer's attention, norms and feed-forward."""
    width, head_size, kv, vocab = 40, 8, 2 * 8, 97
    experts, router, shared = 5 * 3 * 40 * 24, 5 * 40, 3 * 40 * 28
    mixture, dense = experts + router + shared, 3 * 40 * 56

    def attention(heads: int, gate_rows: int, biases: int = 0, head_norms: int = 2 * head_size) -> int:
        projections = 2 * width * heads * head_size + 2 * width * kv
        return projections + gate_rows * width + biases + head_norms

    expected = {
        "qwen2": 2 * (attention(6, 0, 48 + 2 * kv, 0) + dense + 2 * width),
        "llama": 2 * (attention(6, 0, 48 + 2 * kv + width, 0) + dense + 2 * width) + vocab * width,
        "qwen3-next": 2 * (attention(6, 48) + mixture + width + 2 * width),
        "afmoe": 3 * (attention(6, 48) + 4 * width) + dense + 2 * mixture + vocab * width,
        "laguna": attention(4, 4) + attention(6, 6) + attention(2, 2) + dense + 2 * mixture + 3 * 2 * width,
        "step": attention(10, 10) + attention(6, 6) + 2 * mixture + 2 * 2 * width,
    }
    assert expected.keys() == FAMILIES.keys()
    for name, settings in FAMILIES.items():
        counts = count_parameters(settings)
        assert counts.total == expected[name] + vocab * width + width, name
        with torch.device("meta"):
            assert counts.total == sum(parameter.numel() for parameter in Decoder(settings).parameters())
        routed = {"qwen3-next": 2, "afmoe": 2, "laguna": 2, "step": 2}.get(name, 0)
        assert counts.total - counts.active == routed * experts * 3 // 5, name
    assert count_parameters(FAMILIES["laguna"]).gates == (4 + 6 + 2) * width


def test_operations_fall_with_the_window() -> None:
    """4 H C for each key that is out of sight, on the layer with the window alone."""
    windowed = tiny_settings(layers=(LayerSettings(window=5), LayerSettings()))
    sight = sum(min(i, 5) for i in range(1, 18)) / 17
    saved = flops_per_token_forward(tiny_settings(), 17) - flops_per_token_forward(windowed, 17)
    assert saved == pytest.approx(4 * 6 * 8 * (9 - sight), rel=1e-12)
    assert flops_per_token_forward(windowed, 5) == flops_per_token_forward(tiny_settings(), 5)


def test_fresh_norms_multiply_by_one_and_biases_are_zero() -> None:
    for name, settings in FAMILIES.items():
        decoder = tiny_decoder(settings, torch.float32)
        initialize(decoder, 0)
        for key, weight in decoder.state_dict().items():
            if "norm" in key:
                assert (weight == (0 if settings.centred_norms else 1)).all(), (name, key)
            elif key.endswith("bias"):
                assert (weight == 0).all(), (name, key)
            else:
                assert weight.std() > 0.1, (name, key)


def test_layers_of_their_own_leave_the_shared_weights_as_they_are() -> None:
    """A parameter's numbers depend on its name and shape: windows, rotations and biases change none."""
    layers = (LayerSettings(window=3), LayerSettings(rotary=False))
    plain, changed = Decoder(tiny_settings()), Decoder(tiny_settings(layers=layers, biased_projections=("q",)))
    for decoder in (plain, changed):
        initialize(decoder, 0)
    weights = changed.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.state_dict().items())


def test_matching_narrows_the_experts_and_counts_their_layers() -> None:
    """The dense layer keeps its width and its numbers; two of three layers pay for all gates, each at its own shape."""
    mixture = MIXTURE.model_copy(update={"expert_width": 40})
    layers = (LayerSettings(num_heads=4, mixture=False), LayerSettings(), LayerSettings(num_heads=2))
    baseline = tiny_settings(num_layers=3, mixture=mixture, layers=layers, matching_multiple=1)
    arm = with_gate(baseline, find_variant("sdpa_elementwise"), "parameters")
    assert arm.mixture is not None and arm.feedforward_width == 56
    in_gates = 40 * 8 * (4 + 6 + 2)
    assert arm.mixture.expert_width == -((in_gates / (3 * 40 * 2 * 5) - 40) // 1)
    decoders = [Decoder(settings) for settings in (baseline, arm)]
    for decoder in decoders:
        initialize(decoder, 0)
    ours, theirs = (decoder.model.layers[0].mlp.state_dict() for decoder in decoders)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    wide, narrow = (decoder.model.layers[1].mlp.experts.down_proj for decoder in decoders)
    assert torch.equal(wide[:, :, : arm.mixture.expert_width], narrow)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [{}]}, "layers has 1 entries, but num_layers=2; give each layer one, or none"),
        (
            {"layers": [{}, {"num_heads": 5}]},
            "layers.1.num_heads=5 is not divisible by num_kv_heads=2; each key/value head serves equally many query",
        ),
        (
            {"layers": [{"rope": {"fraction": 0.3}}, {}]},
            "head_size=8 with layers.0.rope.fraction=0.3 rotates 2.4 channels; the rotation needs an even number",
        ),
        ({"layers": [{"rope": {}, "rotary": False}, {}]}, "layers.0: rope is given although rotary=False; leave one"),
        ({"layers": [{"window": 0}, {}]}, "layers.0.window cannot be 0"),
        ({"layers": [{"windows": 3}, {}]}, "'layers.0.windows' is unknown; did you mean 'window'?"),
        (
            {"layers": [{}, {"window": 4}], "causal": False},
            "layers.1.window=4 with causal=False is impossible: a window looks back",
        ),
        (
            {"layers": [{"mixture": False}] * 2, "mixture": MIXTURE.to_mapping()},
            "mixture is given, but all layers have mixture=False; leave mixture out",
        ),
        ({"biased_projections": ["q", "v", "q"]}, "biased_projections names 'q' twice"),
        ({"biased_projections": ["gate"]}, "biased_projections.0 cannot be 'gate'; the choices are: q, k, v, o"),
        ({"embedding_scale": 0}, "embedding_scale cannot be 0"),
        (
            {"mixture": {"num_experts": 4, "experts_per_token": 2, "expert_width": 8, "shared_gate": True}},
            "mixture: shared_gate=True gates a shared expert, and there is none; set shared_width",
        ),
        (
            {"mixture": {"num_experts": 4, "experts_per_token": 2, "expert_width": 8, "router": "sigmod"}},
            "mixture.router cannot be 'sigmod'; did you mean 'sigmoid'?",
        ),
    ],
)
def test_impossible_layers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ModelSettings.parse({**tiny_settings().to_mapping(), **changes})
    assert str(refusal.value).startswith(message)


def test_a_layer_is_as_the_model_where_it_says_nothing() -> None:
    settings = tiny_settings(
        rope=RopeSettings(base=70.0),
        mixture=MIXTURE,
        gates=(GateSpec(layers=(1,)),),
        layers=(LayerSettings(num_heads=4, rotary=False, mixture=False), LayerSettings(rope=RopeSettings(base=90.0))),
    )
    assert [settings.shape_on_layer(layer).num_heads for layer in range(2)] == [4, 6]
    assert [settings.rope_on_layer(layer) for layer in range(2)] == [None, RopeSettings(base=90.0)]
    assert [settings.mixture_on_layer(layer) for layer in range(2)] == [None, MIXTURE]
    alike = tiny_settings(mixture=MIXTURE)
    assert alike.on_layer(1) == LayerSettings() and alike.rope_on_layer(1) == alike.rope
    assert alike.shape_on_layer(1) == alike.attention_shape and alike.mixture_on_layer(0) == MIXTURE
