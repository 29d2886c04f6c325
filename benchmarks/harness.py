"""Shared by the benchmarks: timing, the environment's record, tables, pictures.

    python benchmarks/harness.py run          # every op (from a wheel: python -m lltm_ext bench)
    python benchmarks/harness.py plot         # redraws every picture and the tables of pages from
                                              # benchmarks/results; needs no GPU

Ours and its peers take turns, call by call, in one process, because clocks and machines vary: the result is
the ratio of two medians of one run. Inputs are random.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
OPS = sorted(
    {path.stem for path in FOLDER.glob("*.py")}
    - {"harness", "ceiling", "overview", "pages", "tutorial_extension"}
)
IS_CLONE = (FOLDER.parent / "setup.py").is_file()  # results don't belong in an installed package
OURS = "lltm_ext"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

Row = dict[str, Any]
Call = Callable[[], Any]


# ---- timing --------------------------------------------------------------------------------------


class Bench:
    """Times calls on one device. Each candidate of a comparison may take ``seconds``, and has some rounds."""

    def __init__(self, device: torch.device, seconds: float, least_rounds: int = 5):
        self.device, self.seconds, self.least_rounds = device, seconds, least_rounds
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, calls: Mapping[str, Call], *, follows_itself: bool = True) -> dict[str, float]:
        """The median device time of each call (on the CPU: its wall time). The candidates take turns.

        Short calls are timed several at once, against the clock's resolution. On a GPU an untimed call starts
        each turn, unless ``follows_itself`` is False: a call on an idle device would also wait for the host.
        """
        once = {name: self._estimate(call) for name, call in calls.items()}
        inner = {name: max(1, min(50, int(5e-4 / seconds))) for name, seconds in once.items()}
        ahead = int(self.cuda and follows_itself)
        slowest = max(once[name] * (ahead + inner[name]) for name in calls)
        rounds = max(self.least_rounds, min(200, int(self.seconds / slowest)))
        samples: dict[str, list[Any]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                for _ in range(ahead):
                    call()
                samples[name].append(self._sample(call, inner[name]))
        self.synchronize()
        return {
            name: statistics.median(s[0].elapsed_time(s[1]) if self.cuda else s for s in samples[name])
            / inner[name]
            for name in calls
        }

    def _sample(self, call: Call, inner: int) -> Any:
        if self.cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            for _ in range(inner):
                call()
            events[1].record()
            return events
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return (time.perf_counter() - start) * 1e3

    def _estimate(self, call: Call) -> float:
        """Seconds of a call after a warm-up, in which libraries choose algorithms and allocate."""
        times = []
        for _ in range(self.least_rounds):
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[2:])

    def device_milliseconds(
        self,
        calls: Mapping[str, Callable[..., Any]],
        argument_sets: Sequence[tuple[Any, ...]],
        eager: Sequence[str] = (),
    ) -> dict[str, float]:
        """As ``milliseconds``, without host time: a CUDA graph replays a call for each set of arguments.

        Calls named in ``eager`` are not captured: they must be so long that host time does not show.
        """
        if not self.cuda:
            return self.milliseconds({name: rotating(call, argument_sets) for name, call in calls.items()})
        over_all_sets = {
            name: each_of(call, argument_sets) if name in eager else in_graph(call, argument_sets)
            for name, call in calls.items()
        }
        found = self.milliseconds(over_all_sets, follows_itself=False)  # the host is far ahead of graphs
        return {name: time / len(argument_sets) for name, time in found.items()}

    def host_microseconds(
        self, calls: Mapping[str, Call], *, before: Call | None = None, wait: bool = False, rounds: int = 300
    ) -> dict[str, float]:
        """The median time until a call returns, on an idle device; with ``wait``, until the device is done.

        ``before`` runs before each call, untimed; its result is passed to the call.
        """
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(20 + rounds):
            for name, call in calls.items():
                prepared = before and before(name)
                self.synchronize()
                start = time.perf_counter()
                result = call(prepared) if before else call()
                if wait:
                    self.synchronize()
                samples[name].append((time.perf_counter() - start) * 1e6)
                del result, prepared
        return {name: statistics.median(times[20:]) for name, times in samples.items()}

    def peak_mib(self, call: Call, clear: Call) -> float | None:
        """A call's peak device memory, above what ``clear`` leaves allocated."""
        if not self.cuda:
            return None
        call()  # permanent workspaces don't count
        clear()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def in_graph(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> Call:
    """Replays a graph that calls with each set of arguments."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd must have run before it is captured
        for _ in range(2):
            call(*argument_sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(*arguments) for arguments in argument_sets]  # kept, so that each has its own memory

    def replay(results: Any = results) -> None:
        graph.replay()

    return replay


def each_of(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> Call:
    """Calls with each set of arguments."""
    return lambda: [call(*arguments) for arguments in argument_sets]


def rotating(call: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> Call:
    """Calls with one set of arguments after the other, so that they are not in cache.

    Keeps as many results for the same reason; on the CPU only one, so that its allocator reuses pages.
    """
    results: deque[Any] = deque(maxlen=len(argument_sets) if argument_sets[0][0].is_cuda else 1)
    turn = 0

    def next_call() -> None:
        nonlocal turn
        results.append(call(*argument_sets[turn]))
        turn = (turn + 1) % len(argument_sets)

    return next_call


def sets_beyond_cache(bytes_per_set: int, device: torch.device) -> int:
    """How many argument sets exceed the caches; at most 64, because small calls always hit."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 * 2**20
    return max(1, min(64, -(-4 * cache // bytes_per_set)))


# ---- the command line of a benchmark -------------------------------------------------------------


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="time for each candidate of a comparison")
    parser.add_argument("--quick", action="store_true", help="few and small sizes: to see that it runs")
    parser.add_argument(
        "--out", type=Path, help="folder for results/ and plots/ (default: benchmarks/; quick: build/)"
    )
    args = parser.parse_args()
    args.device = torch.device(args.device)
    if args.device.type == "cuda" and args.device.index is None:
        args.device = torch.device("cuda", torch.cuda.current_device())
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    # The large sizes are for a GPU.
    args.small = args.quick or args.device.type == "cpu"
    args.out = args.out or default_folder(args.quick)
    if args.seconds is None:
        args.seconds = 0.02 if args.quick else 0.1
    return args


def default_folder(quick: bool) -> Path:
    if not IS_CLONE:
        return Path.cwd()
    return FOLDER.parent / "build/benchmarks" if quick else FOLDER


def finish(
    op: str,
    args: argparse.Namespace,
    rows: list[Row],
    columns: Sequence[str] | Mapping[str, Sequence[str]],
    claims: Sequence[str] = (),
) -> None:
    """Writes the JSON, prints the table and draws the picture.

    A mapping as ``columns`` makes a table for each key, of the rows with that "part".
    """
    record = {"op": op, "environment": environment(args.device), "claims": list(claims), "rows": rows}
    path = args.out / "results" / slug(args.device) / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    for part, names in columns.items() if isinstance(columns, Mapping) else [("", columns)]:
        table(record, [row for row in rows if row.get("part", "") == part], names, part)
    for claim in claims:
        print(claim)
    print(f"{path}\n{plot(path)}")


# ---- the environment -----------------------------------------------------------------------------


def slug(device: torch.device) -> str:
    """A folder name for the device: 'nvidia-h200', 'cpu'."""
    return "-".join(torch.cuda.get_device_name(device).lower().split()) if device.type == "cuda" else "cpu"


def environment(device: torch.device) -> Row:
    from lltm_ext._install import build_record

    build = build_record.read()
    found: Row = {
        "lltm_ext": build["version"],
        "source": build["source"],  # git rev-parse HEAD:src, of the source that was built
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **nvidia_smi(device),
        }
    return found


def cpu_name() -> str:
    """The system's name and the instructions that torch uses: 'AMD EPYC 9654 (AVX512)'."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def nvidia_smi(device: torch.device) -> Row:
    fields = {
        "driver": "driver_version",
        "sm_clock": "clocks.sm",
        "sm_clock_max": "clocks.max.sm",
        "memory_clock": "clocks.mem",
        "power_limit": "power.limit",
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        answer = subprocess.run(
            [*command, *([f"--id=GPU-{uuid}"] if uuid else [])],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.splitlines()[0].split(",")), strict=True))


# ---- tables --------------------------------------------------------------------------------------


def table(record: Row, rows: Sequence[Row], columns: Sequence[str], part: str) -> None:
    from rich.console import Console
    from rich.table import Table

    where = record["environment"]
    what = f"{record['op']}, {part}" if part else record["op"]
    title = f"{what}: {where.get('gpu', 'CPU')}, torch {where['torch']}, lltm_ext {where['lltm_ext']}"
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(*(_cell(row.get(column)) for column in columns))
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(shown)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


# ---- pictures ------------------------------------------------------------------------------------

INK, GRID = "#333333", "#dddddd"
OUR_COLOR = "#1f5fa8"
PEERS = ("#e08a2c", "#8a8a8a", "#b5525c")


def pyplot() -> Any:
    """matplotlib.pyplot, without a screen and in the style of all pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "axes.edgecolor": INK,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.labelsize": 9,
            "font.size": 9,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": 8,
        }
    )
    return plt


def plot(result: Path) -> Path:
    """Draws <op>.png from <op>.json with the `draw` function of the op's benchmark."""
    pyplot()
    record = json.loads(result.read_text())
    sys.path.insert(0, str(FOLDER))
    figure = importlib.import_module(record["op"]).draw(record)
    picture = result.parents[2] / "plots" / result.parent.name / f"{record['op']}.png"
    save(figure, picture, record["environment"])
    return picture


def save(figure: Any, picture: Path, where: Row) -> None:
    """Writes a figure, with the environment that it was measured in below."""
    footer = ", ".join(
        f"{name} {where[key]}"
        for name, key in (("torch", "torch"), ("cuDNN", "cudnn"), ("lltm_ext", "lltm_ext"))
        if where.get(key)
    )
    figure.supxlabel(f"{where.get('gpu', 'CPU')}, {footer}", fontsize=8, color="#777777")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, facecolor="white")
    pyplot().close(figure)


def series(rows: Iterable[Row], x: str, y: str) -> tuple[list[Any], list[Any]]:
    points = sorted((row[x], row[y]) for row in rows if row.get(y) is not None)
    return [a for a, _ in points], [b for _, b in points]


def color(name: str, names: Sequence[str]) -> str:
    """Blue for ours; the peers' colors follow the order of ``names``."""
    peers = [n for n in names if not n.startswith(OURS)]
    return OUR_COLOR if name.startswith(OURS) else PEERS[peers.index(name) % len(PEERS)]


# ---- run and plot --------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every benchmark, or redraw every picture.")
    parser.add_argument("what", choices=("run", "plot"))
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the folder of results/ (plot)")
    args, rest = parser.parse_known_args()
    if args.what == "plot":
        for result in sorted(args.folder.glob("results/*/*.json")):
            print(plot(result))
        if args.folder == FOLDER and IS_CLONE:
            import overview
            import pages

            print(overview.write())
            pages.write()
        return 0
    statuses = [subprocess.run([sys.executable, FOLDER / f"{op}.py", *rest]).returncode for op in OPS]
    return int(any(statuses))  # a signal gives a negative status


if __name__ == "__main__":
    sys.exit(main())
