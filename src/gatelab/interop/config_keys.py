"""Reading a config.json so that no key that could change the mathematics is overlooked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Bookkeeping, generation and training: keys that never change what a forward pass in eval mode computes. Code that a
# checkpoint names (auto_map) is never run.
HARMLESS = frozenset({
    "_name_or_path", "add_cross_attention", "architectures", "attention_dropout", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p",
    "use_bfloat16", "use_cache",
})  # fmt: skip
# Flags of features that are off when they are false, whatever the family; other flags may change something when false.
OFF_WHEN_FALSE = frozenset({
    "attention_bias", "mlp_bias", "qkv_bias", "use_mrope", "use_sliding_window",
})  # fmt: skip

# Counts that lists are made of, and far more than any model has: a file must not ask for a billion layers.
MOST = {
    "num_hidden_layers": 4096, "num_nextn_predict_layers": 4096, "num_dense_layers": 4096, "num_experts": 65_536,
    "num_local_experts": 65_536, "n_routed_experts": 65_536,
}  # fmt: skip


class ConfigKeys:
    """The keys of one config.json; :meth:`finish` stops for every key that nobody has read."""

    def __init__(self, data: Mapping[str, Any]):
        self.family = str(data.get("model_type"))
        for key, most in MOST.items():
            value = data.get(key)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise ValueError(f"config.json has {key}={value!r}, which is no number from 0 to {most}")
        self._data = dict(data)
        self._left = set(data) - HARMLESS

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, the default where it is absent or null."""
        self._left.discard(key)
        value = self._data.get(key)
        return default if value is None else value

    def says(self, key: str) -> bool:
        """Whether the key is there, even as null."""
        return key in self._data

    def require(self, key: str) -> Any:
        """The value of a key that has no default."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"the config.json of this {self.family} model lacks {key!r}, which has no safe default")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Stop for a value that changes the mathematics in a way that our decoder does not have."""
        value = self.get(key)
        if value is not None and value not in allowed:
            possible = " or ".join(map(repr, allowed))
            raise ValueError(f"config.json has {key}={value!r}; GateLab computes {self.family} models with {possible}")

    def ignore(self, *keys: str) -> None:
        """Note keys that are known not to matter for this family."""
        self._left.difference_update(keys)

    def finish(self) -> None:
        """Raise ``ValueError`` with the names of all keys left that say anything; null and empty ones say nothing."""
        unread = sorted(
            key
            for key in self._left
            if self._data[key] not in (None, [], {}) and not (self._data[key] is False and key in OFF_WHEN_FALSE)
        )
        if unread:
            values = ", ".join(f"{key}={self._data[key]!r}" for key in unread)
            raise ValueError(
                f"config.json has keys that GateLab does not know for {self.family} models and that could change the "
                f"mathematics: {values}; remove them only if you know that they do not"
            )


def layer_types(keys: ConfigKeys, num_layers: int, default: Sequence[str]) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for each layer; other kinds are refused with their layers."""
    given = list(keys.get("layer_types", default))
    kinds = given[:num_layers]
    if len(kinds) != num_layers or len(given) > num_layers + keys.get("num_nextn_predict_layers", 0):
        raise ValueError(f"config.json has {len(given)} layer_types for num_hidden_layers={num_layers}")
    for kind in dict.fromkeys(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            layers = ", ".join(str(layer) for layer, other in enumerate(kinds) if other == kind)
            raise ValueError(
                f"this {keys.family} model has {kind} on layers {layers}; GateLab's decoder has softmax attention alone"
            )
    return kinds


def windows(keys: ConfigKeys, kinds: Sequence[str]) -> list[int | None]:
    """The window of each layer, ``None`` for full attention."""
    window = keys.get("sliding_window")
    if window is None and "sliding_attention" in kinds:
        layer = kinds.index("sliding_attention")
        raise ValueError(f"layer {layer} has sliding_attention, but config.json has no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]
