"""Which parallel layout is fastest: a small model of a step's time, memory and traffic. ``python -m training.plan`` prints its table.

The times are those of FSDP2 with prefetch: communication runs beside compute, and a pass takes as long as the longer of
the two. Collectives are rings (NCCL's choice for all-gather and reduce-scatter over several hosts without NVLink SHARP).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from training import schema
from training.errors import BadInput
from training.flops import ModelShape, flops_per_token, mfu
from training.schema import setting

GB = 1e9
GIB = 2.0**30
REDUCE_BYTES = {"fp32": 4, "bf16": 2}
RECOMPUTE = ("none", "selective", "full")
BLOCKS = ("fast", "fp8", "compiled")
DEFAULT_LOSS_CHUNK = 8192
NEARLY_EQUAL = 0.01


@dataclasses.dataclass(frozen=True)
class Machine:
    """One host's hardware, as the model sees it: every constant is here, and every one is a flag of ``python -m training.plan``."""

    gpu: str = setting(doc="Name as torch.cuda.get_device_name gives it, or cpu.")
    peak_tflops: float = setting(doc="Nominal dense bf16 TFLOP/s; what MFU is a fraction of. The vendor's data sheet.", above=0)
    effective_tflops: float = setting(doc="TFLOP/s that training without recompute reaches (6N + 6Lds a token). Calibrate with ten steps on one GPU.", above=0)
    memory_gib: float = setting(doc="GPU memory that PyTorch sees, GiB.", above=0)
    memory_gbs: float = setting(doc="GPU memory bandwidth, GB/s. The vendor's data sheet.", above=0)
    intra_host_gbs: float = setting(
        doc="Ring bandwidth between a host's GPUs, GB/s in one direction; busbw of all_reduce_perf on one host. Assumed until measured.", above=0
    )
    nic_gbps: float = setting(doc="Nominal speed of one NIC, Gbit/s in one direction.", above=0)
    nics: int = setting(1, "NICs of a host that NCCL uses.", at_least=1)
    nic_efficiency: float = setting(
        0.85, "Share of the NICs' nominal speed that collectives reach: 0.85 assumes EFA, 0.6 TCP. Calibrate: busbw of all_reduce_perf on two hosts.", above=0
    )
    memory_efficiency: float = setting(0.9, "Share of the memory bandwidth that elementwise kernels reach. Assumed.", above=0, at_most=1)
    collective_latency_us: float = setting(
        7.5, "Latency of a collective for each of its ranks, microseconds. 30 over 4 ranks assumed; 35-75 published for EFA.", at_least=0
    )
    launch_ms: float = setting(
        3.8,
        "Host time of a block in one micro-step (Python, FSDP, kernel launches), milliseconds; a GPU that is done sooner waits. Measured beside an H200.",
        at_least=0,
    )
    overhead_gib: float = setting(0.6, "CUDA context and NCCL's buffers, GiB. Assumed.", at_least=0)
    usable_memory: float = setting(
        0.9, "Share of the memory that a plan may fill; the rest is for fragmentation and what the model leaves out.", above=0, at_most=1
    )
    compute_bytes: int = setting(2, "Bytes of a gathered weight and of an activation: 2 with bf16 compute, 4 with float32.", at_least=1)
    state_bytes: int = setting(16, "Bytes a sharded parameter occupies: float32 weight, gradient and AdamW's two moments.", at_least=1)
    optimizer_bytes: int = setting(
        36, "Bytes a parameter's fused AdamW step and clipping move through GPU memory: four states read, three written, the norm.", at_least=1
    )
    logit_bytes: int = setting(2, "Bytes of a logit of the loss chunk: one bf16 matrix, which becomes its own gradient (training/loss.py).", at_least=1)
    blocks: str = setting(
        "fast", "How blocks are computed (setting blocks): fast, fast with its products in fp8, or compiled; decides what they keep.", choices=BLOCKS
    )
    fp8_gain: float = setting(1.37, "With fp8 blocks training is so many times faster than with bf16 ones. Measured on an H200, assumed elsewhere.", above=0)

    @property
    def training_tflops(self) -> float:
        """TFLOP/s of training without recompute, with these blocks."""
        return self.effective_tflops * (self.fp8_gain if self.blocks == "fp8" else 1.0)

    @property
    def is_cpu(self) -> bool:
        """Whether this stands for a CPU, where there is nothing to plan."""
        return self.gpu == "cpu"

    @property
    def host_network_gbs(self) -> float:
        """GB/s in one direction that collectives reach through all NICs of a host."""
        return self.nics * self.nic_gbps / 8 * self.nic_efficiency


# peak and memory bandwidth: NVIDIA's data sheets (dense bf16). effective: H200 measured with this loop and its fast blocks on Qwen2.5-1.5B
# (55.7k tokens/s with one optimizer step for 32,768 tokens, 70% of the 790 TFLOP/s that torch.mm reaches there); H100 as H200, less 5% for its
# slower memory. The others have no cuDNN attention that is faster, which is 5% of an H200's step: two thirds of what torch.mm reaches assumed
# for L4 (70.9, its 72 W cap) and A100 (260); L40S from LLM.Q's published 162 by hand-written kernels, less 7%; A10G a good half of nominal
# (assumed). intra_host: PCIe 4.0 without peer access assumed at 10 (x8) and 20 (x16); NVLink of H200 measured
# (all-gather of one block over two GPUs; 264 with 1 GB), H100 the same, A100 two thirds of it as its links are. NICs: those of g6.12xlarge,
# g5.12xlarge, g6e.12xlarge, p4d.24xlarge, p4de.24xlarge, p5.48xlarge and p5en.48xlarge.
_GPUS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA L4": {"peak_tflops": 121, "effective_tflops": 47, "memory_gib": 21.95, "memory_gbs": 300, "intra_host_gbs": 10, "nic_gbps": 40},
    "NVIDIA A10G": {"peak_tflops": 70, "effective_tflops": 38, "memory_gib": 22.06, "memory_gbs": 600, "intra_host_gbs": 10, "nic_gbps": 40},
    "NVIDIA L40S": {"peak_tflops": 362, "effective_tflops": 150, "memory_gib": 44.4, "memory_gbs": 864, "intra_host_gbs": 20, "nic_gbps": 100},
    "NVIDIA A100-SXM4-40GB": {
        "peak_tflops": 312, "effective_tflops": 176, "memory_gib": 39.4, "memory_gbs": 1555, "intra_host_gbs": 150, "nic_gbps": 100, "nics": 4,
    },
    "NVIDIA A100-SXM4-80GB": {
        "peak_tflops": 312, "effective_tflops": 176, "memory_gib": 79.1, "memory_gbs": 2039, "intra_host_gbs": 150, "nic_gbps": 100, "nics": 4,
    },
    "NVIDIA H100 80GB HBM3": {
        "peak_tflops": 989, "effective_tflops": 526, "memory_gib": 79.1, "memory_gbs": 3350, "intra_host_gbs": 220, "nic_gbps": 100, "nics": 32,
    },
    "NVIDIA H200": {
        "peak_tflops": 989, "effective_tflops": 555, "memory_gib": 139.8, "memory_gbs": 4800, "intra_host_gbs": 220, "nic_gbps": 200, "nics": 16,
    },
}  # fmt: skip

KNOWN_GPUS = tuple(_GPUS)

# Nothing is planned for CPUs, so these speeds decide nothing; the bytes of a float32 weight are what counts.
CPU = Machine(
    gpu="cpu", peak_tflops=0.1, effective_tflops=0.05, memory_gib=4, memory_gbs=10, intra_host_gbs=1, nic_gbps=10, compute_bytes=4, overhead_gib=0
)  # fmt: skip


def machine(gpu: str, **given: float | str) -> Machine:
    """The machine with this GPU (``NVIDIA L4``, or short: ``l4``), with fields of :class:`Machine` replaced by those ``given``.

    Raises BadInput for a GPU that is not in the table unless what the table would say is given, and for values out of bounds.
    """
    wanted = gpu.lower().removeprefix("nvidia ")
    if wanted == "cpu":
        known: Mapping[str, Any] = {f.name: getattr(CPU, f.name) for f in dataclasses.fields(CPU)}
    else:
        short = {name.lower().removeprefix("nvidia "): name for name in _GPUS}
        matches = [name for key, name in short.items() if key == wanted or key.startswith((f"{wanted}-", f"{wanted} "))]
        # A100 alone could be either; the smaller one is the safe reading.
        name = min(matches, key=lambda match: _GPUS[match]["memory_gib"], default=None)
        known = {"gpu": name, **_GPUS[name]} if name is not None else {"gpu": gpu}
    values = {**known, **given}
    missing = [f.name for f in dataclasses.fields(Machine) if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise BadInput(
            f"GPU {gpu!r} is not in the plan's table ({', '.join(KNOWN_GPUS)}); give {', '.join('--' + name.replace('_', '-') for name in missing)} as well"
        )
    return schema.parse(Machine, {schema.file_key(key): value for key, value in values.items()}, where="machine")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """``hosts`` equal hosts with ``gpus_per_host`` workers each, one worker a GPU."""

    hosts: int
    gpus_per_host: int
    machine: Machine

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.gpus_per_host < 1:
            raise BadInput(f"{self.hosts} hosts with {self.gpus_per_host} GPUs each: there must be at least one of both")

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.hosts * self.gpus_per_host


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout. ``reshard`` frees a block's gathered weights after its forward pass; without it they stay until the optimizer step."""

    parallel: str
    reshard: bool
    reduce_dtype: str
    activation_checkpointing: str
    micro_batch: int


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The parts of a :class:`Choice` that a person has decided; None leaves a part to :func:`choose`."""

    parallel: str | None = None
    reshard: bool | None = None
    reduce_dtype: str | None = None
    activation_checkpointing: str | None = None
    micro_batch: int | None = None
    micro_batch_below: int | None = None
    """What was tried and did not fit."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one GPU at the step's peak."""

    states: float
    """Float32 weights and AdamW's moments (sharded), and the gradients of embedding and head."""
    weights: float
    """Gathered weights, and gradients reduced within the host that wait for the all-reduce."""
    activations: float
    """What the forward pass keeps for the backward pass, and the blocks' gradients."""
    workspace: float
    """The loss chunk's logits, and the largest gradient on its way where there is more than one worker."""
    overhead: float
    """CUDA context and NCCL."""

    @property
    def total(self) -> float:
        """GiB."""
        return self.states + self.weights + self.activations + self.workspace + self.overhead


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step is expected to take. Seconds are per optimizer step; those of collectives are as if nothing ran beside them."""

    accumulation: int
    compute_seconds: float
    all_gather_seconds: float
    reduce_scatter_seconds: float
    all_reduce_seconds: float
    exposed_seconds: float
    """Time in which the GPU waits for communication."""
    optimizer_seconds: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    """Attention counted as causal, recomputation not counted."""
    memory: Memory
    between_hosts_bytes: int
    """Per host and direction."""
    binding: str
    """What would shorten the step most if it were twice as fast: compute, host (launching kernels), network (between hosts),
    links (inside a host) or memory (bandwidth)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice and its estimate."""

    choice: Choice
    estimate: Estimate


def accumulation(cluster: Cluster, tokens_per_step: int, sequence_length: int, micro_batch: int) -> int:
    """Micro-steps of an optimizer step: ceil(rows / (workers x micro_batch))."""
    rows = tokens_per_step // sequence_length
    return max(1, math.ceil(rows / (cluster.world * micro_batch)))


def _shards(cluster: Cluster, choice: Choice) -> int:
    return cluster.world if choice.parallel == "fsdp" else cluster.gpus_per_host


def _gathers(choice: Choice, micro_steps: int) -> int:
    """All-gathers of all weights in an optimizer step: two a micro-step when resharded, else one in the first micro-step only."""
    return 2 * micro_steps if choice.reshard else 1


def between_hosts_bytes(shape: ModelShape, cluster: Cluster, choice: Choice, tokens_per_step: int, sequence_length: int) -> int:
    """Bytes that leave each host (and as many that enter it) through its NICs in one optimizer step.

    With N parameters, w bytes of a gathered weight, b of a reduced gradient, p workers on n hosts, A micro-steps; a ring passes every host once:

    - fsdp: (p-1)/p · (G·w·N + A·b·N), where G, the number of all-gathers, is 2A when resharded (forward and backward), else 1
    - hsdp: 2(n-1)/n · b·N, for the all-reduce of the last micro-step alone leaves the host
    - one host: 0

    Not counted: protocol headers (1-3%), and scalars such as the gradient norm (under a kilobyte a step).
    """
    n, p = cluster.hosts, cluster.world
    if n == 1:
        return 0
    reduced = REDUCE_BYTES[choice.reduce_dtype] * shape.parameters
    if choice.parallel == "hsdp":
        return round(2 * (n - 1) / n * reduced)
    micro_steps = accumulation(cluster, tokens_per_step, sequence_length, choice.micro_batch)
    gathered = cluster.machine.compute_bytes * shape.parameters
    return round((p - 1) / p * (_gathers(choice, micro_steps) * gathered + micro_steps * reduced))


def _saved_bytes(shape: ModelShape, blocks: str, activation_checkpointing: str, width: int) -> int:
    """Bytes that a block keeps for the backward pass, per token, with activations of ``width`` bytes.

    Qwen2.5-1.5B in bf16, counted from training/fast/block.py and met by an H200 within 1%: fast 73 kB, without what elementwise work can redo
    (selective) 49 kB; fp8 63 and 58 kB: the products' inputs as one transposed fp8 matrix each. compiled, measured: 83 kB, selective 12 kB
    (the block's input and attention's tensors). full: the block's input, 3 kB.
    """
    d, q, kv, f = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    if activation_checkpointing == "full":
        return d * width
    if blocks == "fp8":
        wide, narrow = 2 * d + 2 * q + 2 * kv + 2 * f, q + f
        return wide * width + narrow + (2 * d if activation_checkpointing == "none" else 0)
    if blocks == "fast":
        return width * (2 * d + 2 * q + 2 * kv + 2 * f + (2 * d + f if activation_checkpointing == "none" else 0))
    return width * (6 * d + 3 * q + 3 * kv + 3 * f if activation_checkpointing == "none" else d + 3 * q)


def blocks_together(shape: ModelShape, machine: Machine, choice: Choice, tokens: int) -> int:
    """Blocks that make one unit of FSDP's, gathered and reduced by one collective, with ``tokens`` in a micro-step of a GPU.

    One, so that communication runs beside compute; but where a GPU is through with a block before its host has launched it, half of what the host
    does is FSDP's, once a unit: then as many as take no more memory, two units being no larger than the root (embedding and head), which is one
    unit anyway. Also one where weights are gathered twice, which is done to save memory.
    """
    if choice.reshard or not _host_is_slower(shape, machine, tokens):
        return 1
    return min(shape.layers, max(1, shape.root_parameters // (2 * shape.block_parameters)))


def replayed(shape: ModelShape, cluster: Cluster, tokens: int, micro_steps: int) -> bool:
    """Whether a step's forward and backward pass are replayed as one CUDA graph (training/replay.py), with ``tokens`` in a micro-step of a GPU.

    So where the GPU would wait for its host, in one micro-step, with blocks written for it. Not on several workers: what a graph exchanges is hidden
    from NCCL's own record, from which a hang is explained, and from the clocks that find a straggler.
    """
    return cluster.world == 1 and micro_steps == 1 and cluster.machine.blocks != "compiled" and _host_is_slower(shape, cluster.machine, tokens)


def _host_is_slower(shape: ModelShape, machine: Machine, tokens: int) -> bool:
    """Whether a GPU is through with a block of ``tokens`` before its host has launched it."""
    return not machine.is_cpu and 6 * shape.block_parameters * tokens / (machine.training_tflops * 1e12) < machine.launch_ms * 1e-3


def _memory(shape: ModelShape, cluster: Cluster, choice: Choice, tokens: int, micro_steps: int, loss_chunk: int) -> Memory:
    m, total, block, root = cluster.machine, shape.parameters, shape.block_parameters, shape.root_parameters
    shards = _shards(cluster, choice)
    reduce_bytes = REDUCE_BYTES[choice.reduce_dtype]
    # Resharded, the block at work and the next one are whole; the root (embedding, head, last norm) is counted as whole throughout.
    weights = m.compute_bytes * (min(total, root + 2 * block) if choice.reshard else total)
    if choice.parallel == "hsdp" and cluster.hosts > 1 and micro_steps > 1:
        weights += reduce_bytes * total // shards
    kept = _saved_bytes(shape, m.blocks, choice.activation_checkpointing, m.compute_bytes)
    redone = _saved_bytes(shape, m.blocks, "none", m.compute_bytes) - kept  # of the one block that is being recomputed
    activations: float = tokens * (shape.layers * kept + redone)
    # Gradients of what is in flight in one block: the activation's, and in fp8 both layouts of those of gate and up.
    activations += tokens * shape.intermediate * {"fast": m.compute_bytes, "fp8": m.compute_bytes + 4, "compiled": 0}[m.blocks]
    # In a single micro-step a block's gradient takes the place of its activations; later micro-steps find it there.
    gradients = 4 * shape.layers * block / shards
    activations = max(activations, gradients) if micro_steps == 1 else activations + gradients
    if m.blocks == "fp8" and choice.activation_checkpointing != "full":
        weights += shape.layers * block  # the fp8 weights, transposed
    loss = min(loss_chunk, tokens) * shape.vocab * m.logit_bytes + shape.embedding_parameters * (4 + m.compute_bytes)
    # Two units at once; those of several blocks are no larger than the root together (blocks_together).
    travelling = (m.compute_bytes + reduce_bytes) * max(2 * block, root)
    return Memory(
        states=(m.state_bytes * total / shards - gradients) / GIB,
        weights=weights / GIB,
        activations=activations / GIB,
        workspace=(loss + (travelling if cluster.world > 1 else 0)) / GIB,
        overhead=m.overhead_gib,
    )


def _recompute_seconds(shape: ModelShape, machine: Machine, choice: Choice, forward: float) -> float:
    blocks = forward * shape.layers * shape.block_parameters / shape.parameters
    # Selective, measured on an H200: fast blocks redo elementwise work only (1.1% of a step), compiled ones two thirds of the block.
    selective = 2 / 3 if machine.blocks == "compiled" else 0.04
    return {"none": 0.0, "selective": selective * blocks, "full": blocks}[choice.activation_checkpointing]


def _not_below(seconds: float, floor: float) -> float:
    """Time of work that a GPU does in ``seconds`` and its host launches in ``floor``: where they are close they partly add up.

    The exponent fits micro-batches of 1 to 16 rows measured on an H200.
    """
    return float((seconds**3 + floor**3) ** (1 / 3))


@dataclasses.dataclass(frozen=True)
class _Times:
    compute: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    exposed: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.optimizer


def _times(shape: ModelShape, cluster: Cluster, choice: Choice, tokens: int, micro_steps: int, sequence_length: int) -> _Times:
    m, n, g, shards = cluster.machine, cluster.hosts, cluster.gpus_per_host, _shards(cluster, choice)
    forward = tokens * flops_per_token(shape, sequence_length) / (m.training_tflops * 1e12) / 3
    backward = 2 * forward + _recompute_seconds(shape, m, choice, forward)
    # Recomputed blocks are launched once more, and gathered ones take part of that again (measured on 1 and 2 H200).
    rounds = 1 + (choice.activation_checkpointing != "none") + 0.5 * choice.reshard
    launches = 0.0 if replayed(shape, cluster, tokens, micro_steps) else rounds * (shape.layers + 1) * m.launch_ms * 1e-3
    forward, backward = _not_below(forward, launches / 3), _not_below(backward, launches * 2 / 3)

    latency = (shape.layers + 1) * m.collective_latency_us * 1e-6
    # The slowest edge of the ring: a NIC where it leaves the host, a link between neighbours where a host has more than one GPU.
    nic = m.host_network_gbs if choice.parallel == "fsdp" and n > 1 else math.inf
    edge = min(nic, m.intra_host_gbs if g > 1 else math.inf) * GB

    def ring(size: float) -> float:
        return (shards - 1) / shards * size / edge + latency * shards if shards > 1 else 0.0

    gathered, reduced = m.compute_bytes * shape.parameters, REDUCE_BYTES[choice.reduce_dtype] * shape.parameters
    all_gather, reduce_scatter, all_reduce = ring(gathered), ring(reduced), 0.0
    if choice.parallel == "hsdp" and n > 1:
        all_reduce = 2 * (n - 1) / n * reduced / (m.host_network_gbs * GB) + latency * n

    gathering_forwards = micro_steps if choice.reshard else 1
    waiting = gathering_forwards * max(0.0, all_gather - forward)
    beside = (all_gather if choice.reshard else 0.0) + reduce_scatter
    waiting += (micro_steps - 1) * max(0.0, beside - backward) + max(0.0, beside + all_reduce - backward)
    root = shape.root_parameters / shape.parameters
    serial = _gathers(choice, micro_steps) * all_gather + micro_steps * reduce_scatter + all_reduce
    return _Times(
        compute=micro_steps * (forward + backward),
        all_gather=_gathers(choice, micro_steps) * all_gather,
        reduce_scatter=micro_steps * reduce_scatter,
        all_reduce=all_reduce,
        # Where communication outlasts compute, the root's part is in the waiting already: never more than all of it.
        exposed=min(waiting + (all_gather + reduce_scatter + all_reduce) * root, serial),
        optimizer=shape.parameters / shards * m.optimizer_bytes / (m.memory_gbs * GB * m.memory_efficiency),
    )


def estimate(shape: ModelShape, cluster: Cluster, choice: Choice, tokens_per_step: int, sequence_length: int, loss_chunk: int = DEFAULT_LOSS_CHUNK) -> Estimate:
    """Time, memory and traffic of one optimizer step of ``tokens_per_step`` tokens in rows of ``sequence_length``.

    Per micro-step: max(forward, all-gather) + max(backward, all-gather if resharded + reduce-scatter + all-reduce if hsdp's last), forward and
    backward being no shorter than the host takes to launch them. On top, once: the root's (embedding, head) part of the first all-gather and of
    the last reduction, beside which nothing can run, and AdamW at memory speed.
    """
    m = cluster.machine
    micro_steps = accumulation(cluster, tokens_per_step, sequence_length, choice.micro_batch)
    rows = max(1, tokens_per_step // sequence_length)
    tokens = min(choice.micro_batch, math.ceil(rows / cluster.world)) * sequence_length

    def times(faster: Machine) -> _Times:
        return _times(shape, dataclasses.replace(cluster, machine=faster), choice, tokens, micro_steps, sequence_length)

    t = times(m)
    twice_as_fast = {
        "compute": dataclasses.replace(m, effective_tflops=2 * m.effective_tflops),
        "host": dataclasses.replace(m, launch_ms=m.launch_ms / 2),
        "network": dataclasses.replace(m, nic_gbps=2 * m.nic_gbps),
        "links": dataclasses.replace(m, intra_host_gbs=2 * m.intra_host_gbs),
        "memory": dataclasses.replace(m, memory_gbs=2 * m.memory_gbs),
    }
    speed = rows * sequence_length / cluster.world / t.step
    return Estimate(
        accumulation=micro_steps,
        compute_seconds=t.compute,
        all_gather_seconds=t.all_gather,
        reduce_scatter_seconds=t.reduce_scatter,
        all_reduce_seconds=t.all_reduce,
        exposed_seconds=t.exposed,
        optimizer_seconds=t.optimizer,
        step_seconds=t.step,
        tokens_per_second_per_gpu=speed,
        mfu=mfu(speed, shape, sequence_length, m.peak_tflops * 1e12),
        memory=_memory(shape, cluster, choice, tokens, micro_steps, loss_chunk),
        between_hosts_bytes=between_hosts_bytes(shape, cluster, choice, tokens_per_step, sequence_length),
        binding=min(twice_as_fast, key=lambda part: times(twice_as_fast[part]).step),
    )


def micro_batches(world: int, rows: int, below: int | None = None) -> list[int]:
    """The smallest micro-batch for each possible accumulation, ascending; any larger one would only add empty rows. ``below``: only smaller ones."""
    share = max(1, math.ceil(rows / world))
    return [size for size in sorted({math.ceil(share / steps) for steps in range(1, share + 1)}) if below is None or size < below]


def choose(
    shape: ModelShape,
    cluster: Cluster,
    tokens_per_step: int,
    sequence_length: int,
    fixed: Fixed | None = None,
    loss_chunk: int = DEFAULT_LOSS_CHUNK,
) -> tuple[Choice, list[Candidate]]:
    """The fastest layout that fits memory and keeps to what is ``fixed``, and all layouts that fit, fastest first.

    Reducing gradients in bf16 loses precision, so float32 is taken where it costs no more than 1%. On a CPU there is nothing to weigh:
    fsdp, float32, no recompute, weights kept gathered, micro-batches of about 4,096 tokens. Raises BadInput when nothing fits.
    """
    fixed = fixed or Fixed()
    rows = max(1, tokens_per_step // sequence_length)

    def candidate(choice: Choice) -> Candidate:
        return Candidate(choice, estimate(shape, cluster, choice, tokens_per_step, sequence_length, loss_chunk))

    if cluster.machine.is_cpu:
        usual = Choice("fsdp", False, "fp32", "none", min(math.ceil(rows / cluster.world), max(1, 4096 // sequence_length)))
        parts = {f.name: getattr(fixed, f.name) for f in dataclasses.fields(Choice)}
        decided = dataclasses.replace(usual, **{name: value for name, value in parts.items() if value is not None})
        return decided, [candidate(decided)]

    # On one host, or with one GPU a host, hsdp is fsdp or plain replication by another name.
    both = cluster.hosts > 1 and cluster.gpus_per_host > 1
    parallels = (fixed.parallel,) if fixed.parallel is not None else ("fsdp", "hsdp") if both else ("fsdp",)
    reshards = (fixed.reshard,) if fixed.reshard is not None else (False, True)
    reduces = (fixed.reduce_dtype,) if fixed.reduce_dtype is not None else ("fp32", "bf16") if cluster.world > 1 else ("fp32",)
    recomputes = (fixed.activation_checkpointing,) if fixed.activation_checkpointing is not None else RECOMPUTE
    sizes = [fixed.micro_batch] if fixed.micro_batch is not None else micro_batches(cluster.world, rows, fixed.micro_batch_below)
    if not sizes:
        raise BadInput("a micro-batch of one row did not fit the GPU when it was tried; shorten the rows, or set activationCheckpointing to full")
    every = [candidate(Choice(*parts)) for parts in itertools.product(parallels, reshards, reduces, recomputes, sizes)]

    room = cluster.machine.memory_gib * cluster.machine.usable_memory
    fitting = [c for c in every if c.estimate.memory.total <= room]
    if not fitting:
        raise BadInput(_nothing_fits(min(every, key=lambda c: c.estimate.memory.total), cluster, shape, room))
    # sorted() is stable: of equals, the order above holds (fsdp, kept gathered, float32, least recompute).
    fitting = sorted(fitting, key=lambda c: c.estimate.step_seconds)
    near = [c for c in fitting if c.estimate.step_seconds <= fitting[0].estimate.step_seconds * (1 + NEARLY_EQUAL)]
    chosen = next((c for c in near if c.choice.reduce_dtype == "fp32"), fitting[0])
    return chosen.choice, fitting


def _nothing_fits(smallest: Candidate, cluster: Cluster, shape: ModelShape, room: float) -> str:
    memory = smallest.estimate.memory
    parts = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
    largest = max(parts, key=lambda name: parts[name])
    ways = {
        "states": "use more GPUs with parallel: fsdp, or a smaller model",
        "weights": "set reshard to yes, or use a smaller model or larger GPUs",
        "activations": "lower microBatch, shorten the rows (sequence length of the prepared data), or set activationCheckpointing to full",
        "workspace": "lower lossChunk",
        "overhead": "use larger GPUs",
    }
    return (
        f"{shape.parameters / 1e9:.2f} B parameters don't fit {cluster.world} x {cluster.machine.gpu}: the smallest layout ({_in_words(smallest.choice)})"
        f" needs {memory.total:.1f} GiB a GPU where {room:.1f} may be filled, most of it for {largest} ({parts[largest]:.1f} GiB); {ways[largest]}"
    )


def _in_words(choice: Choice) -> str:
    return (
        f"{choice.parallel}, reshard {'yes' if choice.reshard else 'no'}, reduce {choice.reduce_dtype},"
        f" recompute {choice.activation_checkpointing}, micro-batch {choice.micro_batch}"
    )


_BINDS = {
    "compute": "the GPUs' compute",
    "host": "the time the host needs to launch kernels",
    "network": "the network between hosts",
    "links": "the links inside a host",
    "memory": "GPU memory bandwidth",
}


def why(cluster: Cluster, chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """For a person: what limits the chosen layout, and what the best of the other kind would cost."""
    e = chosen.estimate
    text = f"{_BINDS[e.binding]} binds"
    if cluster.world > 1:
        text += f"; the GPUs wait {_seconds(e.exposed_seconds)} of a {_seconds(e.step_seconds)} step for communication"
    if e.between_hosts_bytes:
        text += f", and {e.between_hosts_bytes / GB:.1f} GB leave each host"
    other = next((c for c in candidates if c.choice.parallel != chosen.choice.parallel), None)
    if other is not None:
        slower = other.estimate.step_seconds / e.step_seconds - 1
        text += f". The best {other.choice.parallel} would send {other.estimate.between_hosts_bytes / GB:.1f} GB and be "
        text += f"{slower:.0%} slower" if slower >= 0.005 else "as fast"
    return text[0].upper() + text[1:] + "."


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


def _shown(candidates: Sequence[Candidate], chosen: Choice, count: int) -> list[Candidate]:
    """The best micro-batch of each layout, the chosen one first and both parallels among them."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for c in sorted(candidates, key=lambda c: c.choice != chosen):
        best.setdefault((c.choice.parallel, c.choice.reshard, c.choice.reduce_dtype, c.choice.activation_checkpointing), c)
    rows = sorted(best.values(), key=lambda c: (c.choice != chosen, c.estimate.step_seconds))
    shown = rows[:count]
    missing = next((c for c in rows if c.choice.parallel not in {s.choice.parallel for s in shown}), None)
    return shown if missing is None else [*shown[:-1], missing]


def table(candidates: Sequence[Candidate], chosen: Choice, count: int = 10) -> str:
    """The best candidates for a terminal of 80 columns, ``>`` before the chosen one."""
    lines = ["  layout reshard reduce recompute  batch    step  tok/s  MFU   GiB    GB binds"]
    for c in _shown(candidates, chosen, count):
        x, e = c.choice, c.estimate
        lines.append(
            f"{'>' if x == chosen else ' '} {x.parallel:6} {'yes' if x.reshard else 'no':7} {x.reduce_dtype:6} {x.activation_checkpointing:9}"
            f"{f'{x.micro_batch}x{e.accumulation}':>7}{_seconds(e.step_seconds):>8}{e.tokens_per_second_per_gpu:>7,.0f}{e.mfu:>5.0%}"
            f"{e.memory.total:>6.1f}{e.between_hosts_bytes / GB:>6.1f} {e.binding}"
        )
    return "\n".join(lines)


def this_machine(device_type: str, **given: float | str) -> Machine:
    """The machine this process runs on: the table's values with the memory PyTorch reports; an unknown GPU is measured (about a second).

    ``given`` replaces fields of :class:`Machine`; the network can't be seen from here, so pass it where it is known.
    """
    if device_type == "cpu":
        return machine("cpu", **given)
    import torch

    name = torch.cuda.get_device_name()
    here = {"memory_gib": torch.cuda.get_device_properties().total_memory / GIB}
    if name not in _GPUS:
        here |= {**_measured(), "intra_host_gbs": 10, "nic_gbps": 40}
    return machine(name, **{**here, **given})


def _measured() -> dict[str, float]:
    import torch

    def fastest(work: Any) -> float:
        best = math.inf
        for _ in range(8):  # the first ones warm up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1000)
        return best

    side = 4096
    a = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    product = 2 * side**3 / fastest(lambda: a @ a) / 1e12
    source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / fastest(lambda: target.copy_(source)) / GB
    # 0.7: an H200 shows 750 to 790 here and holds 555 in training. The nominal peak can't be asked for, and the burst comes nearest to it.
    return {"peak_tflops": product, "effective_tflops": 0.7 * product, "memory_gbs": copied}


def _model(name: str) -> ModelShape:
    from training.sizes import NAMED_SIZES

    if name in NAMED_SIZES:
        return ModelShape.of(NAMED_SIZES[name])
    from training.storage import place

    folder = place(name)
    file = folder if name.endswith(".json") else folder / "config.json"
    try:
        config = file.read_json()
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {name}: neither a known size ({', '.join(NAMED_SIZES)}) nor a folder with a readable config.json") from error
    if not isinstance(config, dict):
        raise BadInput(f"--model {name}: its config.json is not a mapping")
    return ModelShape.of(config)


def _arguments() -> argparse.ArgumentParser:
    from training.settings import Settings

    parser = argparse.ArgumentParser(
        prog="python -m training.plan", description="Expected speed and memory of every parallel layout; the fastest that fits is marked."
    )
    parser.add_argument(
        "--model", default="qwen2.5-1.5b", metavar="SIZE|PATH", help="a known size, or a folder or URI with a config.json (default: %(default)s)"
    )
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--gpus-per-host", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tokens-per-step", type=int, default=Settings.tokens_per_step, help="global batch (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--loss-chunk", type=int, default=DEFAULT_LOSS_CHUNK, help="tokens whose logits exist at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    decided = parser.add_argument_group("decided already (the rest is chosen)")
    decided.add_argument("--parallel", choices=("fsdp", "hsdp"))
    decided.add_argument("--reshard", choices=("yes", "no"))
    decided.add_argument("--reduce-dtype", choices=tuple(REDUCE_BYTES))
    decided.add_argument("--activation-checkpointing", choices=RECOMPUTE)
    decided.add_argument("--micro-batch", type=int)
    hardware = parser.add_argument_group("hardware (defaults by GPU)")
    hardware.add_argument("--gpu", default="NVIDIA L4", metavar="NAME", help=f"{', '.join(KNOWN_GPUS)}, or another with its values (default: %(default)s)")
    for field in dataclasses.fields(Machine)[1:]:
        kind: dict[str, Any] = {"choices": BLOCKS} if field.name == "blocks" else {"type": float, "metavar": "X"}
        hardware.add_argument("--" + field.name.replace("_", "-"), **kind, help=field.metadata["doc"].replace("%", "%%"))
    return parser


def _positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} {value}: must be at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 0, or 2 for bad input."""
    args = _arguments().parse_args(argv)
    try:
        _positive(hosts=args.hosts, gpus_per_host=args.gpus_per_host, tokens_per_step=args.tokens_per_step)
        _positive(sequence_length=args.sequence_length, loss_chunk=args.loss_chunk, micro_batch=args.micro_batch)
        if args.tokens_per_step % args.sequence_length:
            raise BadInput(f"--tokens-per-step {args.tokens_per_step} is not a multiple of --sequence-length {args.sequence_length}")
        shape = _model(args.model)
        given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Machine)[1:] if getattr(args, f.name) is not None}
        cluster = Cluster(args.hosts, args.gpus_per_host, machine(args.gpu, **given))
        reshard = None if args.reshard is None else args.reshard == "yes"
        fixed = Fixed(args.parallel, reshard, args.reduce_dtype, args.activation_checkpointing, args.micro_batch)
        choice, candidates = choose(shape, cluster, args.tokens_per_step, args.sequence_length, fixed, args.loss_chunk)
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    chosen = next(c for c in candidates if c.choice == choice)
    sentence = why(cluster, chosen, candidates)
    if args.json:
        document = {
            "model": args.model,
            "parameters": shape.parameters,
            "tokensPerStep": args.tokens_per_step,
            "sequenceLength": args.sequence_length,
            "cluster": dataclasses.asdict(cluster),
            "chosen": dataclasses.asdict(chosen),
            "why": sentence,
            "candidates": [dataclasses.asdict(c) for c in candidates],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    m = cluster.machine
    network = f", {m.nics * m.nic_gbps:g} Gb/s a host at {m.nic_efficiency:.0%}" if cluster.hosts > 1 else ""
    sys.stdout.write(
        f"{args.model}: {shape.parameters / 1e9:.2f} B parameters on {cluster.hosts} x {cluster.gpus_per_host} {m.gpu}{network}\n"
        f"{args.tokens_per_step:,} tokens a step in rows of {args.sequence_length:,}; {m.usable_memory:.0%} of {m.memory_gib:g} GiB may be filled\n"
        "(batch: rows x micro-steps of a GPU; tok/s and GiB: a GPU; GB: leaves a host)\n\n"
        f"{table(candidates, choice)}\n\n{textwrap.fill('Why: ' + sentence, 80)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
