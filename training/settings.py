"""Every setting of the training job: one frozen dataclass, checked in one go. ``python -m training.job --help-settings`` lists them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from training import schema
from training.errors import BadInput
from training.schema import setting

RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Where the model comes from: exactly one of the two."""

    pretrained: str | None = setting(
        None, "A Hugging Face hub id, a folder, or an s3:// (any pyarrow) URI of a model in Hugging Face format. Weights are held in float32."
    )
    random: str | dict[str, Any] | None = setting(
        None,
        "Random weights: a named size (tiny, small, qwen2.5-0.5b, qwen2.5-1.5b, qwen3-0.6b, llama-3.2-1b) or a mapping of"
        " transformers configuration values with model_type (qwen2, qwen3, llama, ...). vocab_size follows the data unless given.",
    )

    def __post_init__(self) -> None:
        if (self.pretrained is None) == (self.random is None):
            raise BadInput("model needs exactly one of model.pretrained (a hub id, folder or URI) and model.random (a size such as tiny)")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a run. Lengths are in tokens, times in seconds, unless a setting says otherwise."""

    data: str = setting(doc="Folder or URI that `python -m training.prepare` wrote (it holds manifest.json).")
    model: ModelSettings = setting(doc="")
    run: str | None = setting(
        None,
        "Name of the run, and of its folder under storage: lower-case letters, digits, '.', '_', '-'. The same name resumes."
        " None: made from what decides the result, so the same settings resume and changed ones start anew.",
    )
    storage: str = setting("runs", "Folder or URI (s3://bucket/prefix, any pyarrow URI) that holds the runs. With several hosts it must be shared by them.")

    steps: int = setting(1000, "Optimizer steps of the whole run; the learning-rate schedule spans them.", at_least=1)
    stop_after: int | None = setting(
        None, "Stop after this step with a checkpoint and an export, though the schedule goes on to steps. Start again without it to go on.", at_least=1
    )
    tokens_per_step: int = setting(
        65536,
        "Tokens of the global batch, over all workers and accumulated micro-batches: a multiple of the data's sequence length."
        " Fixed, so that another number of workers changes accumulation and not the result.",
        at_least=1,
    )
    sequence_length: int | None = setting(None, "Tokens in a row. None: as the data was prepared; anything else must agree with it.", at_least=2)
    micro_batch: int | None = setting(None, "Rows in one forward pass of one worker. None: the plan chooses by memory.", at_least=1)
    document_mask: bool = setting(
        False, "Tokens attend within their own document only, and no document is asked to predict the next one. Slower attention on GPUs."
    )

    learning_rate: float = setting(2e-5, "Peak learning rate. 2e-5 suits full fine-tuning of a 1-2 B model; a tiny random model wants 1e-3.", above=0)
    final_learning_rate: float = setting(0.1, "Where the cosine ends, as a fraction of the peak.", at_least=0, at_most=1)
    warmup_steps: int = setting(20, "Steps of linear warm-up.", at_least=0)
    weight_decay: float = setting(0.1, "AdamW's decoupled weight decay, on matrices only (not on norms and biases).", at_least=0)
    beta1: float = setting(0.9, "AdamW's first-moment decay.", at_least=0, at_most=0.9999)
    beta2: float = setting(0.95, "AdamW's second-moment decay; 0.95 forgets spikes sooner than 0.999.", at_least=0, at_most=0.999999)
    grad_clip: float = setting(1.0, "Global gradient norm is clipped to this; 0 turns clipping off.", at_least=0)
    seed: int = setting(0, "Seed of random weights and of the data order.", at_least=0, at_most=2**31 - 1)

    precision: str = setting(
        "auto",
        "Compute type; master weights, optimizer states and the loss are float32 always. auto: bf16 on GPUs, fp32 on CPUs."
        " fp8: the blocks' matrix products in fp8, the rest in bf16; bf16 where the GPU or the model's blocks don't allow it.",
        choices=("auto", "bf16", "fp32", "fp8"),
    )
    parallel: str = setting(
        "auto", "fsdp shards over all workers, hsdp within each host and replicates across hosts; auto asks the plan.", choices=("auto", "fsdp", "hsdp")
    )
    reshard: str = setting(
        "auto", "Drop a block's gathered weights after its forward pass (less memory, more traffic); auto asks the plan.", choices=("auto", "yes", "no")
    )
    reduce_dtype: str = setting("auto", "Type in which gradients travel; auto: fp32 on CPUs, else the plan's choice.", choices=("auto", "fp32", "bf16"))
    activation_checkpointing: str = setting(
        "auto",
        "Recompute in the backward pass: nothing, all but the matrix products and attention, or whole blocks; auto: as little as fits.",
        choices=("auto", "none", "selective", "full"),
    )
    blocks: str = setting(
        "auto",
        "How a block is computed: by this package's own kernels (fast; qwen2 and llama on GPUs), by torch.compile (compiled), or by transformers'"
        " modules as they are (plain). auto: fast where it can be, else compiled on GPUs and plain on CPUs.",
        choices=("auto", "fast", "compiled", "plain"),
    )
    loss_chunk: int = setting(8192, "Tokens whose logits exist at the same time: 2.5 GB in bf16 at 8,192 tokens of Qwen2.5.", at_least=1)

    workers: int = setting(1, "Processes, one a GPU where there are GPUs.", at_least=1)
    min_workers: int | None = setting(
        None,
        "Under Ray: the run goes on with as few workers as this when a node is lost, and takes up to workers again when there is room for them;"
        " the global batch stays. None: always as many as workers, and it waits for them.",
        at_least=1,
    )
    cpus_per_worker: int = setting(1, "CPUs that Ray sets aside for a worker.", at_least=1)
    device: str = setting("auto", "auto: cuda where a GPU is present.", choices=("auto", "cpu", "cuda"))
    max_failures: int = setting(2, "Restarts of the worker group after a lost worker, each from the last complete checkpoint.", at_least=0)
    collective_timeout: int = setting(
        600, "Seconds after which a stuck collective ends the run; PyTorch's own default of 1800 bills half an hour for nothing.", at_least=10
    )

    hang_factor: float = setting(
        10.0,
        "A step that takes this many times the median of the last ones (and hangFloor at least) is a hang: every rank leaves its stacks in the"
        " run's folder, the rank that is late is named, and the run fails, to be restarted (maxFailures). 0: never; a stuck collective then ends it.",
        at_least=0,
    )
    hang_floor: int = setting(
        180,
        "Seconds without a step that are no hang yet, however short steps are: what compiles anew or reads from a slow store needs them."
        " Evaluations, checkpoints and the export don't count. Below collectiveTimeout, or that comes first.",
        at_least=1,
    )
    on_divergence: str = setting(
        "stop",
        "At a loss, gradient or weight that is not finite, or a spike: stop, or go back to the last checkpoint (the start, where there is none) and on"
        " from there with other rows: those of the steps since are left out, in this run and in each restart of it.",
        choices=("stop", "rollback"),
    )
    spike_factor: float = setting(
        0.0,
        "A logged loss is a spike where it exceeds the median of the last ones by this many standard deviations (estimated robustly, from the median"
        " absolute deviation); 8 is careful. 0: never, because most spikes pass by themselves, and text that changes its kind looks like one.",
        at_least=0,
    )
    max_rollbacks: int = setting(3, "Times that one start of the run goes back before it stops after all.", at_least=0)

    log_every: int = setting(10, "Steps between two lines of metrics.jsonl.", at_least=1)
    eval_every: int = setting(0, "Steps between evaluations on the held-out rows; 0: at the end only.", at_least=0)
    eval_rows: int = setting(256, "Held-out rows in an evaluation at most; 0: no evaluation.", at_least=0)
    checkpoint_every: int = setting(200, "Steps between checkpoints; the final one is always written.", at_least=1)
    keep_checkpoints: int = setting(
        2, "Complete checkpoints kept; older ones are deleted after a newer one is complete. The final one is kept always.", at_least=1
    )
    storage_patience: int = setting(
        300,
        "Seconds for which storage may refuse checkpoints and the run's record before that ends the run: what could not be written is tried again"
        " meanwhile, and training goes on. 0: the first refusal ends it.",
        at_least=0,
    )
    export: bool = setting(True, "At the end write model/ in Hugging Face format (bf16 weights).")
    transport: str = setting(
        "any",
        "Which network must have carried the run between hosts: with efa or tcp the run stops (exit 4) unless that is proved.",
        choices=("efa", "tcp", "any"),
    )
    nics_per_host: int | None = setting(None, "EFA interfaces that NCCL must use on each host. None: at least one.", at_least=1)
    gpu_direct: bool = setting(False, "With efa: demand GPUDirect RDMA. Only p4d, p5 and their like have it; g6 never does.")

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.run is not None and not RUN_NAME.fullmatch(self.run):
            problems.append(f"run = {self.run!r}: use 1 to 63 lower-case letters, digits, '.', '_' and '-', with a letter or digit first and last")
        if self.stop_after is not None and self.stop_after > self.steps:
            problems.append(f"stopAfter = {self.stop_after} lies beyond steps = {self.steps}; lower it or raise steps")
        if self.min_workers is not None and self.min_workers > self.workers:
            problems.append(f"minWorkers = {self.min_workers} is more than workers = {self.workers}; lower it, or raise workers")
        if self.warmup_steps > self.steps:
            problems.append(f"warmupSteps = {self.warmup_steps} is longer than the run (steps = {self.steps}); lower warmupSteps")
        if self.sequence_length is not None and self.tokens_per_step % self.sequence_length:
            problems.append(not_divisible(self.tokens_per_step, self.sequence_length))
        if problems:
            raise BadInput("; ".join(problems))


def not_divisible(tokens_per_step: int, sequence_length: int) -> str:
    """The sentence for a global batch that is no whole number of rows, with the nearest that are."""
    below = tokens_per_step // sequence_length * sequence_length
    near = f"{below} or {below + sequence_length}" if below else f"{sequence_length}"
    return f"tokensPerStep = {tokens_per_step} is not a multiple of the sequence length {sequence_length}; use {near}"


# What may change between two starts of the same run without making it another run: where and how it runs, not what it computes.
FREE_TO_CHANGE = frozenset(
    """run storage data sequenceLength steps stopAfter microBatch precision parallel reshard reduceDtype activationCheckpointing blocks lossChunk
    workers minWorkers cpusPerWorker device maxFailures collectiveTimeout logEvery evalEvery evalRows checkpointEvery keepCheckpoints export transport
    nicsPerHost gpuDirect storagePatience hangFactor hangFloor onDivergence spikeFactor maxRollbacks""".split()
)


def identity(settings: Settings, data_hash: str) -> dict[str, Any]:
    """What makes two starts the same run: the settings that decide the result, and the hash of the data's manifest."""
    fixed = {k: v for k, v in schema.as_mapping(settings).items() if k not in FREE_TO_CHANGE}
    return {**fixed, "dataHash": data_hash}


def run_name(settings: Settings, data_hash: str) -> str:
    """The run's folder name: the one given, or model plus 8 hex digits of :func:`identity`."""
    if settings.run is not None:
        return settings.run
    source = settings.model.pretrained or (settings.model.random if isinstance(settings.model.random, str) else "custom")
    base = re.sub(r"[^a-z0-9.-]+", "-", source.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-.") or "run"
    digest = hashlib.sha256(json.dumps(identity(settings, data_hash), sort_keys=True).encode()).hexdigest()[:8]
    return f"{base[:50]}-{digest}"


def load(path: str | None, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a file and ``--set`` overrides. Raises BadInput with all problems."""
    raw: Mapping[str, Any] = schema.read_file(path) if path else {}
    return schema.parse(Settings, schema.apply_overrides(raw, overrides), where=path or "settings")
