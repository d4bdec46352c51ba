"""The all-reduce bandwidth curve of a Ray cluster; runs in its head as a Ray job. Prints one line of JSON behind ``RESULT ``.

Where the image has them, NCCL's own all_reduce_perf does it, started by mpirun, whose remote shell is Ray itself: no MPI operator, no SSH. Elsewhere
torch.distributed: nccl on GPUs, gloo on CPUs. Bandwidths are in GB/s as nccl-tests defines them: bus = size / time * 2 (n - 1) / n
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# The image's: where this file is checked, neither is installed.
ray: Any = importlib.import_module("ray")
strategies: Any = importlib.import_module("ray.util.scheduling_strategies")

PLACES = (
    "/opt/amazon/openmpi/bin",
    "/opt/amazon/openmpi5/bin",
    "/usr/local/bin",
    "/opt/nccl-tests/build",
    "/usr/local/cuda/efa/test-cuda-13.0",
    "/usr/local/cuda/efa/test-cuda-13.0/bin",
)
REPEATS, WARM_UP = 10, 3


def tool(name: str) -> str | None:
    """A program of the image, on PATH or where AWS's images keep it."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(PLACES))


def nodes() -> list[dict[str, Any]]:
    """The workers' nodes, those with GPUs where there are any; the head takes no part."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    gpus = [node for node in alive if node["Resources"].get("GPU")]
    return sorted(gpus or alive, key=lambda node: str(node["NodeManagerAddress"]))


def on(node: dict[str, Any], what: Any, **options: Any) -> Any:
    """``what`` (a function or class) as Ray runs it on that node."""
    return ray.remote(num_cpus=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), **options)(what)


def find_tools() -> tuple[str | None, str | None]:
    return tool("mpirun"), tool("all_reduce_perf")


def shell(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False)
    return done.returncode, done.stdout


def remote_shell(host: str, command: list[str]) -> int:
    """What mpirun calls in place of ssh: runs its daemon on ``host`` as a Ray task, and stays until the daemon ends."""
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    node = next(node for node in nodes() if host in (node["NodeManagerAddress"], node["NodeManagerHostname"]))
    code, text = ray.get(on(node, shell).remote(["bash", "-c", " ".join(command)], {}))
    sys.stdout.write(text)
    return int(code)


def all_reduce_perf(mpirun: str, perf: str, where: list[dict[str, Any]], environment: dict[str, str], most: str) -> dict[str, Any]:
    """Runs NCCL's own benchmark over all GPUs, one process each."""
    each = int(where[0]["Resources"].get("GPU", 1))
    hosts = ",".join(f"{node['NodeManagerAddress']}:{each}" for node in where)
    agent = f"{sys.executable} {Path(__file__).resolve()} --remote-shell"
    command = [mpirun, "--allow-run-as-root", "--tag-output", "-np", str(each * len(where)), "--host", hosts]
    command += ["--mca", "plm_rsh_agent", agent, "--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "btl", "tcp,self", "--mca", "pml", "ob1"]
    command += ["--mca", "btl_tcp_if_exclude", "lo,docker0", "--bind-to", "none"]
    # The launcher's environment reaches the ranks only by name.
    for name in sorted({"LD_LIBRARY_PATH", "PATH", *environment}):
        command += ["-x", name]
    command += [perf, "-b", "8", "-e", most, "-f", "2", "-g", "1", "-n", "20", "-w", "5"]
    # The remote shell, which mpirun starts, must find this cluster again.
    here = {"RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}
    code, text = ray.get(on(where[0], shell).remote(command, {**environment, **here}))
    rows = parsed(text)
    if code or not rows:
        raise RuntimeError(f"{shlex.join(command)} ended with {code}: {text[-2000:]}")
    return {"tool": "all_reduce_perf", "ranks": each * len(where), "hosts": len(where), "rows": rows}


def parsed(text: str) -> list[dict[str, float]]:
    """The out-of-place columns of nccl-tests: size, count, type, redop, root, time (us), algbw, busbw."""
    rows = []
    for line in text.splitlines():
        fields = line.split("<stdout>:")[-1].split("]")[-1].replace("[", "").split()
        if len(fields) >= 8 and fields[0].isdigit() and fields[1].isdigit():
            rows.append({"bytes": float(fields[0]), "seconds": float(fields[5]) / 1e6, "algorithm": float(fields[6]), "bus": float(fields[7])})
    return rows


class Rank:
    """One process of torch.distributed."""

    def address(self) -> str:
        with socket.socket() as sock:
            sock.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}"

    def measure(self, address: str, rank: int, world: int, sizes: list[int], backend: str) -> list[float]:
        """Median seconds of an all-reduce of each size (bytes of float32)."""
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world)
        found = []
        for size in sizes:
            data = torch.zeros(max(1, size // 4), device=device)
            times = []
            for turn in range(WARM_UP + REPEATS):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(data)
                if backend == "nccl":
                    torch.cuda.synchronize()
                if turn >= WARM_UP:
                    times.append(time.perf_counter() - began)
            found.append(statistics.median(times))
        dist.destroy_process_group()
        return found


def torch_curve(where: list[dict[str, Any]], environment: dict[str, str], most: int) -> dict[str, Any]:
    """One rank a GPU, or a node where there is none."""
    gpus = int(where[0]["Resources"].get("GPU", 0))
    backend = "nccl" if gpus else "gloo"
    runtime = {"env_vars": environment}
    ranks = [on(node, Rank, num_gpus=1 if gpus else 0, runtime_env=runtime).remote() for node in where for _ in range(max(1, gpus))]
    sizes = [2**power for power in range(10, 40, 2) if 2**power <= most]
    address = ray.get(ranks[0].address.remote())
    times = ray.get([actor.measure.remote(address, rank, len(ranks), sizes, backend) for rank, actor in enumerate(ranks)])
    rows = []
    for index, size in enumerate(sizes):
        seconds = max(one[index] for one in times)
        algorithm = size / seconds / 1e9
        rows.append({"bytes": float(size), "seconds": seconds, "algorithm": algorithm, "bus": algorithm * 2 * (len(ranks) - 1) / len(ranks)})
    return {"tool": f"torch.distributed ({backend})", "ranks": len(ranks), "hosts": len(where), "rows": rows}


def main() -> int:
    said = json.loads(Path("curve.json").read_text())
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    where = nodes()
    environment = {str(key): str(value) for key, value in said["environment"].items()}
    mpirun, perf = ray.get(on(where[0], find_tools).remote())
    note = ""
    found: dict[str, Any] | None = None
    if where[0]["Resources"].get("GPU") and mpirun and perf:
        try:
            found = all_reduce_perf(mpirun, perf, where, environment, str(said["mostBytes"]))
        except (RuntimeError, subprocess.SubprocessError) as error:
            note = f"all_reduce_perf did not run ({str(error)[-300:]})"
    elif where[0]["Resources"].get("GPU"):
        note = "the image has no all_reduce_perf or no mpirun"
    found = found or torch_curve(where, environment, int(said["mostBytes"]))
    sys.stdout.write("RESULT " + json.dumps({**found, "note": note}) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--remote-shell"]:
        sys.exit(remote_shell(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
