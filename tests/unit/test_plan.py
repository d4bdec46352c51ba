"""The plan: its arithmetic against numbers worked out elsewhere, and what must hold for any cluster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.errors import BadInput
from training.flops import ModelShape, flops_per_token, mfu
from training.plan import (
    CPU,
    KNOWN_GPUS,
    NEARLY_EQUAL,
    RECOMPUTE,
    Choice,
    Cluster,
    Fixed,
    accumulation,
    between_hosts_bytes,
    blocks_together,
    choose,
    estimate,
    machine,
    main,
    replayed,
    this_machine,
)
from training.sizes import NAMED_SIZES

QWEN = ModelShape.of(NAMED_SIZES["qwen2.5-1.5b"])
L4_PAIR = Cluster(2, 4, machine("NVIDIA L4"))


def step_of(cluster, choice, micro_steps):
    return cluster.world * choice.micro_batch * 2048 * micro_steps


# ---- shapes and FLOPs


@pytest.mark.parametrize("size", NAMED_SIZES)
def test_a_named_size_has_the_parameters_of_the_real_model(size):
    import torch
    import transformers

    values = dict(NAMED_SIZES[size])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    shape = ModelShape.of(NAMED_SIZES[size])
    assert shape.parameters == counted
    assert shape.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert ModelShape.of(config.to_dict()) == shape, "the full configuration says the same as the short one"
    assert config.rope_parameters == NAMED_SIZES[size]["rope_parameters"]


@pytest.mark.parametrize(
    "changed",
    [{"tie_word_embeddings": False}, {"model_type": "llama", "attention_bias": True, "mlp_bias": True}, {"model_type": "qwen3", "attention_bias": True}],
)
def test_biases_norms_and_untied_heads_are_counted_as_transformers_makes_them(changed):
    import torch
    import transformers

    values = {**NAMED_SIZES["tiny"], **changed}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ModelShape.of({**NAMED_SIZES["tiny"], **changed}).parameters == sum(p.numel() for p in model.parameters())


def test_published_parameter_counts():
    assert QWEN.parameters == 1_543_714_304
    assert ModelShape.of(NAMED_SIZES["qwen2.5-0.5b"]).parameters == 494_032_768
    assert ModelShape.of(NAMED_SIZES["llama-3.2-1b"]).parameters == 1_235_814_400


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, "model_type = 'bert'"),
        ({**NAMED_SIZES["tiny"], "hidden_size": 0}, "hidden_size = 0"),
        ({"model_type": "qwen2"}, "hidden_size = None"),
    ],
)
def test_a_configuration_that_cannot_be_counted_says_which_value_is_wrong(config, says):
    with pytest.raises(BadInput, match=says):
        ModelShape.of(config)


def test_flops_of_a_token_in_both_conventions():
    assert 6 * QWEN.parameters == pytest.approx(9.262e9, rel=1e-3)
    assert flops_per_token(QWEN, 2048, causal=False) - 6 * QWEN.parameters == pytest.approx(1.057e9, rel=1e-3)
    assert flops_per_token(QWEN, 2048) - 6 * QWEN.parameters == pytest.approx(1.057e9 / 2, rel=1e-3)
    untied = dataclasses.replace(QWEN, tied=False)
    assert flops_per_token(untied, 2048) == flops_per_token(QWEN, 2048), "an input embedding is looked up, not multiplied with"
    assert mfu(40_400, QWEN, 2048, 989e12) == pytest.approx(0.40, rel=1e-3)
    assert mfu(38_300, QWEN, 2048, 989e12, causal=False) == pytest.approx(0.40, rel=2e-3)


# ---- against a table worked out by hand for 2 hosts x 4 L4, 40 Gb/s, PCIe at 10 GB/s, 48 TFLOP/s


TABLE = [  # choice, micro-steps, tokens/s/GPU at 85% of the NIC, at 60%
    (Choice("fsdp", True, "fp32", "none", 2), 1, 1431, 1013),
    (Choice("fsdp", True, "fp32", "none", 2), 8, 1583, 1119),
    (Choice("hsdp", True, "fp32", "none", 2), 8, 3403, 3174),
    (Choice("hsdp", True, "fp32", "full", 8), 2, 3661, 3624),
    (Choice("fsdp", True, "fp32", "full", 8), 2, 3686, 3637),
    (Choice("hsdp", False, "bf16", "none", 2), 8, 4478, 4275),
]


def test_speeds_and_their_order_agree_with_the_table():
    for efficiency, column in ((0.85, 2), (0.6, 3)):
        cluster = Cluster(2, 4, machine("l4", nic_efficiency=efficiency, effective_tflops=48))
        speeds = []
        for row in TABLE:
            choice, micro_steps = row[0], row[1]
            e = estimate(QWEN, cluster, choice, step_of(cluster, choice, micro_steps), 2048)
            assert e.accumulation == micro_steps
            assert e.tokens_per_second_per_gpu == pytest.approx(row[column], rel=0.02), f"{choice}, {micro_steps} micro-steps, NIC at {efficiency}"
            speeds.append((row[column], e.tokens_per_second_per_gpu))
        assert [ours for _, ours in sorted(speeds)] == sorted(ours for _, ours in speeds), "the order of the layouts is the table's"


def test_weak_scaling_agrees_with_the_table():
    for parallel, expected in (("fsdp", (4119, 1583, 1476, 1424, 1392)), ("hsdp", (4119, 3403, 3131, 3011, 2954))):
        for hosts, speed in zip((1, 2, 4, 8, 16), expected, strict=True):
            cluster = Cluster(hosts, 4, machine("l4", effective_tflops=48))
            choice = Choice(parallel, True, "fp32", "none", 2)
            e = estimate(QWEN, cluster, choice, step_of(cluster, choice, 8), 2048)
            assert e.tokens_per_second_per_gpu == pytest.approx(speed, rel=0.05), f"{parallel} on {hosts} hosts"


@pytest.mark.parametrize(
    ("blocks", "recompute", "micro_batch", "chunk", "seconds", "gibibytes"),
    [
        ("fast", "none", 16, 4096, 0.590, 86.6),
        ("fast", "none", 16, 8192, 0.588, 88.9),
        ("fast", "none", 24, 8192, 0.871, 120.5),
        ("fast", "selective", 16, 4096, 0.597, 66.1),
        ("fp8", "none", 16, 8192, 0.433, 81.0),
        ("fp8", "none", 24, 8192, 0.632, 108.1),
    ],
)
def test_what_one_h200_measured_is_met(blocks, recompute, micro_batch, chunk, seconds, gibibytes):
    """This loop's FSDP2, one micro-step of rows of 2,048 tokens of Qwen2.5-1.5B, peak memory that PyTorch allocated (benchmarks/step.py)."""
    choice = Choice("fsdp", False, "fp32", recompute, micro_batch)
    e = estimate(QWEN, Cluster(1, 1, machine("NVIDIA H200", blocks=blocks)), choice, micro_batch * 2048, 2048, chunk)
    assert e.step_seconds == pytest.approx(seconds, rel=0.03)
    assert e.memory.total - e.memory.overhead == pytest.approx(gibibytes, rel=0.02)
    assert e.binding == "compute"


@pytest.mark.parametrize(
    ("choice", "seconds", "gibibytes", "tolerance"),
    [
        (Choice("fsdp", False, "fp32", "none", 4), 0.401, 40.1, 0.15),
        (Choice("fsdp", False, "bf16", "none", 8), 0.704, 55.9, 0.05),
        (Choice("fsdp", True, "fp32", "full", 4), 0.576, 22.7, 0.15),
        (Choice("fsdp", True, "fp32", "full", 16), 1.720, 25.1, 0.05),
        (Choice("fsdp", False, "fp32", "selective", 4), 0.569, 25.8, 0.15),
        (Choice("fsdp", True, "fp32", "none", 4), 0.461, 37.7, 0.15),
    ],
)
def test_what_two_h200_of_one_host_measured_is_met(choice, seconds, gibibytes, tolerance):
    """With compiled blocks, FlashAttention 2 and a loss in float32: what holds between two GPUs does not depend on them."""
    then = machine("NVIDIA H200", blocks="compiled", effective_tflops=480, logit_bytes=10)
    e = estimate(QWEN, Cluster(1, 2, then), choice, 2 * 2 * choice.micro_batch * 2048, 2048, loss_chunk=4096)
    assert e.step_seconds == pytest.approx(seconds, rel=tolerance)
    assert e.memory.total - e.memory.overhead == pytest.approx(gibibytes, rel=0.09)


@pytest.mark.parametrize(
    ("choice", "micro_steps", "gigabytes"),
    [
        (Choice("fsdp", True, "fp32", "none", 2), 1, 10.8),
        (Choice("fsdp", True, "fp32", "none", 2), 8, 86.4),
        (Choice("fsdp", True, "bf16", "none", 2), 1, 8.1),
        (Choice("fsdp", False, "bf16", "none", 2), 1, 5.4),
        (Choice("fsdp", False, "bf16", "none", 2), 4, 2.7 + 4 * 2.7),
        (Choice("hsdp", True, "fp32", "none", 2), 8, 6.17),
        (Choice("hsdp", False, "bf16", "none", 2), 1, 3.09),
    ],
)
def test_bytes_between_hosts_agree_with_the_table(choice, micro_steps, gigabytes):
    moved = between_hosts_bytes(QWEN, L4_PAIR, choice, step_of(L4_PAIR, choice, micro_steps), 2048)
    assert moved / 1e9 == pytest.approx(gigabytes, rel=0.005)


# ---- what must hold everywhere


choices = st.builds(
    Choice,
    parallel=st.sampled_from(("fsdp", "hsdp")),
    reshard=st.booleans(),
    reduce_dtype=st.sampled_from(("fp32", "bf16")),
    activation_checkpointing=st.sampled_from(RECOMPUTE),
    micro_batch=st.integers(1, 16),
)
clusters = st.builds(
    Cluster,
    hosts=st.integers(1, 9),
    gpus_per_host=st.integers(1, 8),
    machine=st.builds(
        lambda gpu, gbps, inside: machine(gpu, nic_gbps=gbps, intra_host_gbs=inside), st.sampled_from(KNOWN_GPUS), st.floats(1, 800), st.floats(1, 400)
    ),
)
shapes = st.sampled_from([ModelShape.of(config) for config in NAMED_SIZES.values()])
rows = st.integers(1, 512)


@given(shapes, clusters, choices, rows)
def test_every_estimate_is_finite_positive_and_adds_up(shape, cluster, choice, count):
    e = estimate(shape, cluster, choice, count * 512, 512)
    parts = (e.all_gather_seconds, e.reduce_scatter_seconds, e.all_reduce_seconds, e.exposed_seconds)
    assert min(parts) >= 0
    assert e.step_seconds == pytest.approx(e.compute_seconds + e.exposed_seconds + e.optimizer_seconds)
    assert e.exposed_seconds <= sum(parts[:3]) * (1 + 1e-9), "a GPU can't wait longer than the communication takes"
    assert 0 < e.mfu < 1
    assert e.binding in ("compute", "host", "network", "links", "memory")


@given(shapes, clusters, choices, rows)
def test_memory_grows_with_the_micro_batch(shape, cluster, choice, count):
    smaller = estimate(shape, cluster, choice, count * 512, 512).memory.total
    larger = estimate(shape, cluster, dataclasses.replace(choice, micro_batch=choice.micro_batch + 1), count * 512, 512)
    if larger.accumulation > 1:  # with one micro-step hsdp keeps no partial sums, and a batch beyond the rows is not filled
        assert larger.memory.total >= smaller


@given(shapes, clusters, choices, rows, st.floats(1, 10), st.sampled_from(("nic_gbps", "intra_host_gbs", "effective_tflops", "memory_gbs")))
def test_faster_hardware_is_never_slower(shape, cluster, choice, count, factor, part):
    faster = dataclasses.replace(cluster.machine, **{part: getattr(cluster.machine, part) * factor})
    before = estimate(shape, cluster, choice, count * 512, 512).step_seconds
    assert estimate(shape, dataclasses.replace(cluster, machine=faster), choice, count * 512, 512).step_seconds <= before * (1 + 1e-9)


@given(shapes, clusters, choices, rows)
def test_nothing_leaves_a_single_host_and_hsdp_does_not_depend_on_accumulation(shape, cluster, choice, count):
    alone = dataclasses.replace(cluster, hosts=1)
    assert between_hosts_bytes(shape, alone, choice, count * 512, 512) == 0
    replicated = dataclasses.replace(choice, parallel="hsdp")
    one, many = (between_hosts_bytes(shape, cluster, replicated, n * 512, 512) for n in (1, count))
    assert one == many
    if cluster.hosts > 1:
        assert 0 < one < 2 * 4 * shape.parameters, "a ring all-reduce sends less than twice the gradients"


@given(shapes, clusters, choices)
def test_one_gpu_has_no_communication(shape, cluster, choice):
    alone = dataclasses.replace(cluster, hosts=1, gpus_per_host=1)
    e = estimate(shape, alone, choice, 8 * 512, 512)
    assert (e.all_gather_seconds, e.reduce_scatter_seconds, e.all_reduce_seconds, e.exposed_seconds) == (0, 0, 0, 0)


@settings(max_examples=40, deadline=None)
@given(clusters, st.integers(1, 64), st.sampled_from((None, "fsdp", "hsdp")), st.sampled_from((None, 1, 3)))
def test_the_chosen_layout_fits_keeps_what_is_fixed_and_no_other_is_much_faster(cluster, count, parallel, micro_batch):
    shape, fixed = ModelShape.of(NAMED_SIZES["qwen2.5-0.5b"]), Fixed(parallel=parallel, micro_batch=micro_batch)
    choice, candidates = choose(shape, cluster, count * 2048, 2048, fixed)
    chosen = estimate(shape, cluster, choice, count * 2048, 2048)
    assert chosen.memory.total <= 0.9 * cluster.machine.memory_gib
    assert parallel in (None, choice.parallel)
    assert micro_batch in (None, choice.micro_batch)
    assert [c.estimate.step_seconds for c in candidates] == sorted(c.estimate.step_seconds for c in candidates)
    every = itertools.product(
        (parallel,) if parallel else ("fsdp",), (True, False), ("fp32", "bf16"), RECOMPUTE, (micro_batch,) if micro_batch else range(1, 9)
    )
    for other in (Choice(*parts) for parts in every):
        e = estimate(shape, cluster, other, count * 2048, 2048)
        if e.memory.total <= 0.9 * cluster.machine.memory_gib:
            assert chosen.step_seconds <= e.step_seconds * (1 + NEARLY_EQUAL + 1e-9), f"{other} fits and is faster"


def test_float32_sums_are_kept_where_bf16_gains_nothing():
    fast = Cluster(2, 8, machine("NVIDIA H100 80GB HBM3"))
    choice, _ = choose(QWEN, fast, 2**20, 2048)
    assert choice.reduce_dtype == "fp32"
    choice, _ = choose(QWEN, L4_PAIR, 2**16, 2048)
    assert choice.reduce_dtype == "bf16", "40 Gb/s is worth it"


def test_a_slow_network_moves_the_choice_to_hsdp():
    slow = Cluster(2, 4, machine("l4", nic_gbps=10))
    assert choose(QWEN, slow, 2**17, 2048)[0].parallel == "hsdp"


@pytest.mark.parametrize(("count", "workers", "micro_batch", "expected"), [(32, 8, 4, 1), (32, 8, 3, 2), (33, 8, 4, 2), (1, 8, 4, 1), (7, 2, 1, 4)])
def test_accumulation_is_rows_over_workers_and_micro_batch_rounded_up(count, workers, micro_batch, expected):
    assert accumulation(Cluster(1, workers, machine("l4")), count * 128, 128, micro_batch) == expected


def test_on_a_cpu_there_is_nothing_to_weigh():
    choice, candidates = choose(ModelShape.of(NAMED_SIZES["tiny"]), Cluster(1, 2, this_machine("cpu")), 64 * 128, 128)
    assert choice == Choice("fsdp", False, "fp32", "none", 32)
    assert len(candidates) == 1
    fixed, _ = choose(ModelShape.of(NAMED_SIZES["tiny"]), Cluster(2, 2, this_machine("cpu")), 64 * 128, 128, Fixed("hsdp", True, "bf16", "full", 2))
    assert fixed == Choice("hsdp", True, "bf16", "full", 2), "what a person fixed is kept"


def test_a_model_that_fits_nowhere_says_how_much_is_missing_and_what_to_do():
    with pytest.raises(BadInput, match=r"1\.54 B parameters don't fit 1 x NVIDIA L4.* needs 26\.\d GiB .*states.*use more GPUs"):
        choose(QWEN, Cluster(1, 1, machine("l4")), 2**16, 2048)
    with pytest.raises(BadInput, match="lower microBatch"):
        choose(QWEN, L4_PAIR, 2**20, 2048, Fixed(micro_batch=64, activation_checkpointing="none"))


def test_machines_by_the_name_pytorch_gives_by_a_short_one_and_by_values():
    assert machine("NVIDIA L4").gpu == machine("l4").gpu == "NVIDIA L4"
    assert machine("l40s").memory_gib > machine("l4").memory_gib
    assert machine("a100").memory_gib < 40, "an ambiguous name is read as the smaller GPU"
    assert machine("l4", nic_gbps=10).nic_gbps == 10
    with pytest.raises(BadInput, match=r"'Tesla T4' is not in the plan's table .*give --peak-tflops, --effective-tflops"):
        machine("Tesla T4")
    t4 = machine("Tesla T4", peak_tflops=65, effective_tflops=28, memory_gib=14.6, memory_gbs=320, intra_host_gbs=8, nic_gbps=50)
    assert t4.gpu == "Tesla T4"
    with pytest.raises(BadInput, match="nicGbps = -1"):
        machine("l4", nic_gbps=-1)
    with pytest.raises(BadInput, match="at least one"):
        Cluster(0, 4, machine("l4"))


# ---- the command line


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "training.plan", *arguments], capture_output=True, text=True, check=False)


def test_the_table_fits_80_columns_marks_one_layout_and_says_why():
    done = run()
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert sum(line.startswith(">") for line in done.stdout.splitlines()) == 1
    assert "Why: " in done.stdout
    assert " fsdp " in done.stdout
    assert " hsdp " in done.stdout


def test_json_holds_every_candidate_and_follows_the_flags(capsys):
    assert main(["--model", "llama-3.2-1b", "--gpu", "h100", "--nic-efficiency", "0.5", "--parallel", "hsdp", "--reshard", "yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"]["machine"]["nic_efficiency"] == 0.5
    assert document["chosen"] in document["candidates"]
    assert {c["choice"]["parallel"] for c in document["candidates"]} == {"hsdp"}
    assert {c["choice"]["reshard"] for c in document["candidates"]} == {True}


# ---- units of FSDP


@given(gpu=st.sampled_from(KNOWN_GPUS), tokens=st.integers(1, 2**17), size=st.sampled_from(sorted(NAMED_SIZES)), reshard=st.booleans())
def test_blocks_share_a_unit_only_while_the_host_is_the_slower_part(gpu, tokens, size, reshard):
    shape, choice, here = ModelShape.of(NAMED_SIZES[size]), Choice("fsdp", reshard, "fp32", "none", 1), machine(gpu)
    together = blocks_together(shape, here, choice, tokens)
    assert 1 <= together <= shape.layers
    assert together >= blocks_together(shape, here, choice, 2 * tokens), "more tokens never make a unit larger"
    if reshard:
        assert together == 1, "a unit is what memory holds twice"
    if together > 1:
        root = shape.parameters - shape.layers * shape.block_parameters
        assert 2 * together * shape.block_parameters <= root, "or a smaller micro-batch would need more memory"


def test_the_default_keeps_a_unit_for_each_block_and_a_small_job_does_not():
    small = Choice("fsdp", False, "fp32", "none", 1)
    assert blocks_together(QWEN, machine("NVIDIA L4"), small, 2048) == 1
    assert blocks_together(QWEN, machine("NVIDIA L4"), small, 128) == 2
    assert blocks_together(QWEN, machine("NVIDIA H200"), small, 16 * 2048) == 1
    assert blocks_together(QWEN, machine("NVIDIA H200"), small, 2048) == 2


# ---- steps replayed as a CUDA graph


@given(
    gpu=st.sampled_from(KNOWN_GPUS),
    tokens=st.integers(1, 2**17),
    size=st.sampled_from(sorted(NAMED_SIZES)),
    hosts=st.integers(1, 3),
    micro_steps=st.integers(1, 3),
)
def test_only_a_single_worker_that_its_host_holds_up_replays_its_steps(gpu, tokens, size, hosts, micro_steps):
    shape, here = ModelShape.of(NAMED_SIZES[size]), machine(gpu)
    found = replayed(shape, Cluster(hosts, 1, here), tokens, micro_steps)
    if hosts > 1 or micro_steps > 1:
        assert not found, "a graph hides collectives, and holds one micro-step"
    if found:
        assert replayed(shape, Cluster(1, 1, here), max(1, tokens // 2), 1), "fewer tokens leave the GPU waiting all the more"
        assert not replayed(shape, Cluster(1, 1, dataclasses.replace(here, launch_ms=0.0)), tokens, 1), "a host that takes no time holds nobody up"
    assert not replayed(shape, Cluster(hosts, 1, dataclasses.replace(here, blocks="compiled")), tokens, micro_steps)


def test_a_short_step_on_one_gpu_is_replayed_and_planned_without_its_launches_and_a_long_one_is_not():
    one = Cluster(1, 1, machine("NVIDIA H200"))
    assert replayed(QWEN, one, 128, 1)
    assert not replayed(QWEN, one, 16 * 2048, 1)
    assert not replayed(QWEN, Cluster(1, 1, CPU), 128, 1)
    choice = Choice("fsdp", False, "fp32", "none", 1)
    short, launched = (estimate(QWEN, dataclasses.replace(one, machine=m), choice, 128, 128) for m in (one.machine, machine("NVIDIA H200", blocks="compiled")))
    assert short.step_seconds < 0.05 < launched.step_seconds, "measured: 39 ms with and 115 to 155 without"


def test_a_model_folder_can_be_planned(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(NAMED_SIZES["qwen3-0.6b"]))
    assert main(["--model", str(tmp_path)]) == 0
    assert "0.60 B parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-9"], "--model gpt-9: neither a known size"),
        (["--gpu", "T4"], "not in the plan's table"),
        (["--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--tokens-per-step", "1000"], "not a multiple of --sequence-length 2048"),
        (["--hosts", "1", "--gpus-per-host", "1"], "don't fit"),
        (["--nic-gbps", "0"], "nicGbps = 0"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(arguments, says, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert err.count("\n") == 1


def test_planning_needs_no_torch():
    code = "import sys, training.plan; training.plan.main([]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
