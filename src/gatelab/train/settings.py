"""How a run trains, and with the model's and the data's settings a whole run. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gatelab.data.settings import DataSettings
from gatelab.model.settings import ModelSettings, PatchSettings
from gatelab.settings import Settings


class OptimizerSettings(Settings):
    """AdamW (Loshchilov and Hutter 1711.05101) without decay of norms, biases, input-independent gates, sink logits."""

    learning_rate: float = Field(default=3e-3, gt=0, description="peak of the schedule")
    gate_learning_rate: float | None = Field(default=None, gt=0, description="peak for gates; as the rest when None")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    gate_weight_decay: float | None = Field(default=None, ge=0, description="for gates; as the rest when None")
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="largest global gradient norm; not clipped when None"
    )


class ScheduleSettings(Settings):
    """Linear warm-up, then a cosine to the final rate, or a stable phase and a linear decay to it (WSD)."""

    kind: Literal["cosine", "warmup_stable_decay"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)
    decay_steps: int = Field(default=0, ge=0, description="for warmup_stable_decay: length of the last phase")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="rate of the last step / peak")

    @model_validator(mode="after")
    def _check(self) -> ScheduleSettings:
        if self.kind == "cosine" and self.decay_steps:
            raise ValueError(f"kind=cosine with decay_steps={self.decay_steps} is impossible: it decays all the way")
        return self


class EvaluationSettings(Settings):
    """When the held-out text is scored and the model examined; the end of a run always does both, on all of it."""

    every: int = Field(default=100, gt=0, description="steps between evaluations")
    windows: int = Field(default=32, gt=0, description="windows of each domain that an evaluation on the way scores")
    measure_every: int = Field(default=50, gt=0, description="steps between measurements of sinks, gates and maxima")
    measured_windows: int = Field(default=2, gt=0, description="held-out windows that a measurement on the way reads")
    final_measured_windows: int = Field(default=16, gt=0, description="held-out windows of the measurement at the end")


class CheckpointSettings(Settings):
    """When the run is saved and what happens when it is started again."""

    every: int = Field(default=200, gt=0, description="steps between checkpoints; the last step always has one")
    keep: int = Field(default=2, gt=0, description="how many of the newest are kept")
    asynchronous: bool = Field(
        default=False, description="train on while one is written, from a copy of the state in the processor's memory"
    )
    resume: Literal["auto", "never", "required"] = Field(
        default="auto",
        description="auto continues where there is something to continue, never refuses to, required must",
    )
    same_environment: bool = Field(
        default=True,
        description="refuse to continue under another torch, instruction set or number of threads, where the result "
        "would no longer equal that of an uninterrupted run bit for bit",
    )


class ParallelSettings(Settings):
    """How many ranks share a run, and what each of them has; ranks = replicate x shard x tensor.

    Data-parallel ranks (replicate x shard) read different rows of one global batch, so their number changes no batch.
    """

    replicate: int = Field(default=1, gt=0, description="groups of ranks that each hold all weights between them")
    shard: int | Literal["all"] = Field(
        default=1,
        description="data-parallel ranks that share the weights, gradients and optimizer state of a group (FSDP); "
        "all: as many as replicate and tensor leave of the ranks that were started",
    )
    tensor: int = Field(
        default=1, gt=0, description="ranks that share every layer's heads, with their gates, and feed-forward width"
    )
    expert: int = Field(
        default=1, gt=0, description="neighbouring shard ranks that share the experts of each mixture; it divides shard"
    )
    context: int = Field(default=1, gt=0, description="ranks that share a sequence; 1 alone is possible")

    @model_validator(mode="after")
    def _check(self) -> ParallelSettings:
        if self.shard != "all" and self.shard < 1:
            raise ValueError(f"shard={self.shard} is no number of ranks; give 1 or more, or all")
        if self.context > 1:
            raise ValueError(
                f"context={self.context} is not possible: windows, document masks, sinks and measured attention need "
                "every key of a sequence on one rank; set context=1 and raise shard or tensor"
            )
        if self.expert > 1 and self.tensor > 1:
            raise ValueError(
                f"expert={self.expert} with tensor={self.tensor} is not possible: tensor ranks share the experts "
                "already; set expert=1"
            )
        if self.shard != "all" and self.shard % self.expert:
            raise ValueError(f"expert={self.expert} does not divide shard={self.shard}, whose ranks share the experts")
        return self

    @property
    def is_alone(self) -> bool:
        """Whether one process trains by itself."""
        return self == ParallelSettings()


class TrainSettings(Settings):
    """Steps, batch, optimizer, precision, and what is watched on the way."""

    steps: int = Field(default=1000, gt=0)
    sequences_per_step: int = Field(default=8, gt=0, description="global batch, whatever the accumulation")
    accumulation: int = Field(
        default=1,
        gt=0,
        description="pieces that a step's batch is computed in, one after another; a mixture's expert frequencies are "
        "buffered over the pieces (Qiu et al. 2501.11873), so its balancing loss is exact with 1 alone",
    )
    seed: int = Field(default=0, ge=0, description="decides initial weights and the order of batches")
    start_from: str | None = Field(
        default=None,
        min_length=1,
        description="a folder with model.safetensors of the same model (a checkpoint, or what save_start wrote): the "
        "weights before the first step; random ones when None",
    )
    precision: Literal["bfloat16", "float32", "float64"] = Field(
        default="bfloat16", description="dtype of activations; weights and optimizer are float32 (float64 with float64)"
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    balance_loss_weight: float = Field(default=1e-2, ge=0, description="for mixtures of experts")
    router_z_loss_weight: float = Field(default=1e-3, ge=0, description="for mixtures of experts")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="when a step's loss or gradient norm is not finite: end the run, leave the update out, or also go "
        "back to the weights and optimizer state of the last checkpoint before it and read on after that batch",
    )
    max_nonfinite: int = Field(default=10, gt=0, description="skipped or rolled-back steps after which the run stops")
    compile: bool = Field(default=False, description="torch.compile of each layer and the loss; needs a C++ compiler")
    recompute: bool = Field(default=False, description="recompute each layer's activations in the backward pass")
    deterministic: bool = Field(default=True, description="deterministic kernels only: the same bits in every run")
    threads: int | None = Field(default=None, gt=0, description="CPU threads; PyTorch's own choice when None")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where tensors are; auto is CUDA where PyTorch finds it, else the processor"
    )
    parallel: ParallelSettings = ParallelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tensorboard: bool = Field(default=False, description="also write TensorBoard events; needs the extra 'track'")

    @model_validator(mode="after")
    def _check(self) -> TrainSettings:
        if self.sequences_per_step % self.accumulation:
            raise ValueError(
                f"sequences_per_step={self.sequences_per_step} is not divisible by accumulation={self.accumulation}"
            )
        phases = self.schedule.warmup_steps + self.schedule.decay_steps
        if phases > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} and schedule.decay_steps="
                f"{self.schedule.decay_steps} together exceed steps={self.steps}"
            )
        return self


class RunSettings(Settings):
    """A whole run: what a recipe returns, what a run folder saves, and what runs it again."""

    schema_version: Literal[1] = 1
    model: ModelSettings
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()

    @model_validator(mode="after")
    def _check(self) -> RunSettings:
        if self.data.context > self.model.max_context:
            raise ValueError(
                f"data.context={self.data.context} exceeds model.max_context={self.model.max_context}, the longest "
                "sequence that the rotary embedding is meant for"
            )
        self._check_images()
        if not self.model.causal and self.data.masking is None and self.data.images is None:
            raise ValueError(
                "model.causal=False can't be trained to predict the next token, which every query would see; "
                "set model.causal=true, or data.masking={} to find hidden tokens"
            )
        if self.model.causal and self.data.masking is not None:
            raise ValueError(
                "data.masking hides tokens that are found from both sides, and model.causal=True sees one side alone; "
                "set model.causal=false, or leave data.masking out"
            )
        needed = self.data.vocab_size_needed
        if needed > self.model.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} is smaller than the data's vocabulary of {needed}"
                + (", the two ids of [SEP] and [MASK] included" if self.data.masking is not None else "")
            )
        return self

    def _check_images(self) -> None:
        patches, images = self.model.patches, self.data.images
        if images is None:
            if patches is not None:
                raise ValueError("model.patches reads images, and data.images is none; set data.images={}")
            return
        wanted = PatchSettings(pixels=images.patch_size**2, levels=images.levels)
        if patches != wanted:
            raise ValueError(
                f"data.images of patch_size={images.patch_size} are read by a model with patches; set "
                f"model.patches={{pixels: {wanted.pixels}, levels: {wanted.levels}}}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step reads."""
        return self.train.sequences_per_step * self.data.context
