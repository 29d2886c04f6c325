"""scan and cells without a product: compared with a copy of the same bytes and with other libraries' scans.

All is float32. "Copy" moves as many bytes as a call has to, by a kernel: torch's copy of memory takes half as
long again in a CUDA graph. What these bytes are, ``BYTES`` and ``bytes_of_cell`` say. Times are the device's.

- scan: the steps are [T, B, H], with an a and a b for each. The peers are torch's associative_scan, with a
  backward made of it (its own one gives the gradient zero for a), accelerated-scan's kernels in Triton and
  CUDA ("warp"), and flash-linear-attention's HGRN, recurrent and in chunks. A peer gets its own layout,
  contiguous, so no conversion is timed: accelerated-scan [B, H, T], of which "warp" takes powers of two;
  HGRN [B, T, H] and the logarithm of a, for which it also computes the gradient.
- constant a: a number, and torchaudio's lfilter of the first order, on [B * H, T].
- GAE: of differences, as a scan with resets; of rewards and values, ours by torch's ops and the scan, eager
  and compiled, and a Triton kernel in the manner of rl-triton, which PyPI lacks, on [B, T].
- cells: called with ``weight_ih=None``, from 100 MB on.

A peer whose result differs, that fails or that compiles for too long is listed as "not measured". The
run ends after 1,800 times --seconds, and a peer may compile for 400 times that.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from harness import INK, OUR_COLOR, OURS, Bench, Row, finish, parse, sets_beyond_cache
from harness import PEERS as COLORS
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

import lltm_ext
from lltm_ext import cells
from lltm_ext._formula.graph import ancestors

ASSOCIATIVE = "associative_scan"
TRITON, WARP = "accelerated-scan Triton", "accelerated-scan warp"
RECURRENT, CHUNK = "HGRN recurrent", "HGRN chunk"
COPY, LFILTER, TRITON_GAE, OURS_COMPILED = "copy", "lfilter", "Triton", f"{OURS}, compiled"
# The order of the dimensions of [T, B, H].
TIME_FIRST, TIME_LAST, BATCH_FIRST = (0, 1, 2), (1, 2, 0), (1, 0, 2)
BYTES = {  # an element
    "scan": {"forward": 12, "training": 32},  # a, b, h; and a, h, the gradient of h; those of a and b
    "constant a": {"forward": 8, "training": 16},  # b, h; and the gradients of h and b
    "GAE": {"of differences": 9, "of rewards": 13},  # float32, but a byte for done
}
CELLS = (cells.mingru, cells.minlstm, cells.sru, cells.rg_lru, cells.lif, cells.indrnn)
DECAY, GAMMA = 0.9, 0.99
MOST_COPIED = 2**32  # bytes of a buffer; more are copied in several turns
LONG = 4e9  # bytes, from which a call is so long that host time does not show
Function = Callable[..., Any]
Scan = Callable[[Tensor, Tensor], Tensor]  # (a, b) -> h


class Sizes(NamedTuple):
    batch: int
    steps: int
    hidden: int

    def __str__(self) -> str:
        return f"({self.batch:,}, {self.steps:,}, {self.hidden:,})"

    @property
    def elements(self) -> int:
        return self.batch * self.steps * self.hidden


FULL = [
    Sizes(64, 4096, 1024),
    Sizes(64, 4096, 64),
    Sizes(1, 2**20, 16),
    Sizes(64, 16384, 1),
    Sizes(8, 65536, 1536),
    Sizes(4096, 128, 1),
]
SMALL = [Sizes(4, 256, 1), Sizes(4, 64, 16)]
OF_GAE = Sizes(64, 16384, 1)


def some_random(count: int) -> list[Sizes]:
    """Sizes of 1 to 400 MB a tensor, the same in each run."""
    rng = random.Random(0)
    found: list[Sizes] = []
    while len(found) < count:
        batch, steps, hidden = (int(2 ** rng.uniform(0, most)) for most in (10, 20, 12))
        if 2**18 <= batch * steps * hidden <= 10**8:
            found.append(Sizes(batch, steps, hidden))
    return found


# ---- measuring -------------------------------------------------------------------------------------------


OVER = "the run's time was over"


class NotMeasuredError(Exception):
    pass


class Run:
    """What all comparisons share: the timer, the time that is left, and why something was not measured."""

    def __init__(self, bench: Bench):
        self.bench, self.failures = bench, dict[str, str]()
        self.end = time.monotonic() + 1800 * bench.seconds
        self.compiling: dict[str, float] = defaultdict(float)  # seconds, by peer
        self.most_compiling = 400 * bench.seconds

    def times(
        self,
        what: str,
        calls: Mapping[str, Function],
        sets: Sequence[Any],
        checks: Mapping[str, Function] = {},
    ) -> dict[str, float]:
        """Milliseconds of the calls, which take turns. A call that is much slower is timed once, by itself.

        Args:
            what: the part, the mode and the sizes.
            checks: for the result of a call, what is wrong with it, if anything.
        """
        once = {
            name: self.seconds(what, name, call, sets[0], checks.get(name)) for name, call in calls.items()
        }
        found = {name: seconds for name, seconds in once.items() if seconds is not None}
        most = max(5e-3, 10 * found.get(OURS, 0))
        slow = {name: 1e3 * t for name, t in found.items() if t > 0.1 or t > most}
        fast = {name: calls[name] for name in found if name not in slow}
        if not fast:
            return slow
        try:
            eager = tuple(fast) if moved_bytes(sets) > LONG else ()
            return slow | self.bench.device_milliseconds(fast, sets, eager)
        except Exception as error:
            self.failures[f"{what}, graph"] = message(error)
            return slow | self.bench.device_milliseconds(fast, sets, tuple(fast))

    def seconds(
        self, what: str, name: str, call: Function, arguments: Sequence[Any], check: Function | None
    ) -> float | None:
        """Of a call whose kernels are compiled; or None, and why it is not measured."""
        try:
            if self.is_over:
                raise NotMeasuredError(OVER)
            if name != OURS and self.compiling[name] > self.most_compiling:
                raise NotMeasuredError(f"compiled for {self.compiling[name]:.0f} s at the sizes before")
            first = self._timed(call, arguments, check)
            seconds = self._timed(call, arguments)
            self.compiling[name] += first - seconds
            return seconds
        except Exception as error:
            self.failures[f"{what}, {name}"] = message(error)
            return None

    def _timed(self, call: Function, arguments: Sequence[Any], check: Function | None = None) -> float:
        start = time.perf_counter()
        result = call(*arguments)
        self.bench.synchronize()
        seconds = time.perf_counter() - start
        if check and (wrong := check(result)):
            raise NotMeasuredError(wrong)
        return seconds

    def rows(self, measure: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
        """The rows of a comparison; none if it fails or the run's time is over."""
        try:
            if self.is_over:
                raise NotMeasuredError(OVER)
            return measure(self, *arguments)
        except Exception as error:
            named = (getattr(x, "__name__", x) for x in arguments if not isinstance(x, dict))
            self.failures[f"{measure.__name__} of {', '.join(map(str, named))}"] = message(error)
            if isinstance(error, torch.AcceleratorError):
                self.end = 0.0  # nothing runs on the device after that
            return []

    @property
    def is_over(self) -> bool:
        return self.bench.cuda and time.monotonic() > self.end


def message(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, NotMeasuredError) else f"{type(error).__name__}: {text}"


# The last argument of every call: a tensor of half of the bytes that it moves, and how often to copy it.
class Half(NamedTuple):
    tensor: Tensor
    times: int

    @classmethod
    def of(cls, moved: int, device: torch.device) -> Half:
        times = -(-moved // (2 * MOST_COPIED))
        return cls(torch.empty(moved // (8 * times), device=device), times)


def copy(*arguments: Any) -> Tensor:
    half = arguments[-1]
    for _ in range(half.times - 1):
        half.tensor.neg()
    return half.tensor.neg()


def moved_bytes(sets: Sequence[Any]) -> int:
    half = sets[0][-1]
    return 8 * half.tensor.numel() * half.times


def make_sets(bench: Bench, moved: int, make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """As many sets of arguments as exceed the cache."""
    if bench.cuda:
        torch.cuda.empty_cache()
    return [(*make(), Half.of(moved, bench.device)) for _ in range(sets_beyond_cache(moved, bench.device))]


def trained(scan: Function, leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(scan(*leaves), leaves, grad)


def row_of(part: str, what: str, sizes: Sizes, moved: int, times: Mapping[str, float]) -> Row:
    row: Row = {"part": part, "mode": what, "(B, T, H)": str(sizes), "MB": moved / 1e6}
    row |= {f"{name} ms": time for name, time in times.items()}
    return row | {f"/ {name}": times[OURS] / t for name, t in times.items() if OURS in times and name != OURS}


# ---- other libraries' scans ------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A scan of another library. ``load`` imports it, which may compile it."""

    module: str
    load: Callable[[], Scan]
    order: tuple[int, int, int] = TIME_FIRST
    of_log: bool = False  # it takes the logarithm of a
    powers_of_two: tuple[int, int] | None = None  # the fewest and most steps, where others are not allowed
    training: Function | None = None  # (a, b, grad) -> the gradients of a and b, if not by autograd

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def takes(self) -> tuple[Any, ...]:
        """What its arguments depend on: peers that agree in it share them."""
        return self.order, self.of_log

    def refuses(self, steps: int) -> str | None:
        if self.powers_of_two is None:
            return None
        least, most = self.powers_of_two
        allowed = least <= steps <= most and steps & (steps - 1) == 0
        return None if allowed else f"it takes a power of two of steps, {least:,} to {most:,}"

    def arguments(self, a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """a, b and the gradient of h, which are [T, B, H], as it takes them."""
        given = a.log() if self.of_log else a, b, grad
        return tuple(x.permute(self.order).contiguous() for x in given)

    def time_first(self, x: Tensor) -> Tensor:
        """What it returns, as [T, B, H]."""
        return x.permute([self.order.index(dim) for dim in range(3)])


# ---- torch's ---------------------------------------------------------------------------------------------


def combine(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return then[0] * first[0], then[0] * first[1] + then[1]


def states(a: Tensor, b: Tensor, reverse: bool = False, combine_mode: str = "pointwise") -> Tensor:
    return associative_scan(combine, (a, b), dim=0, reverse=reverse, combine_mode=combine_mode)[1]


def gradients(a: Tensor, h: Tensor, grad: Tensor, combine_mode: str = "pointwise") -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(a[:1])
    of_b = states(torch.cat([a[1:], zeros]), grad, True, combine_mode)
    return of_b * torch.cat([zeros, h[:-1]]), of_b


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for each size anew."""
    torch._dynamo.config.recompile_limit = 100
    return torch.compile(function, dynamic=False)


def scan_of_torch(a: Tensor, b: Tensor) -> Tensor:
    return compiled(states)(a, b)


def training_of_torch(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of associative_scan gives the gradient zero for a, by matrices of T x T (torch 2.11)."""
    return compiled(gradients)(a, scan_of_torch(a, b), grad)


# ---- accelerated-scan and flash-linear-attention ---------------------------------------------------------


def accelerated_triton() -> Scan:
    from accelerated_scan.scalar import scan

    return scan


def accelerated_warp() -> Scan:
    from accelerated_scan.warp import scan  # compiles it, if no process has

    return scan


def tune_quickly(kernel: Any) -> None:
    """Leaves a kernel the configurations with a thread a channel, because all take minutes to compile."""
    from triton.testing import do_bench

    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    kernel.configs = [x for x in kernel.configs if x.kwargs["BD"] == 32 * x.num_warps]
    kernel.do_bench = functools.partial(do_bench, warmup=5, rep=20)


def tuned(hgrn: Callable[..., Any], *kernels: Any) -> Scan:
    """HGRN's function. It chooses its configuration for each number of channels by the first 1,024 steps."""
    known = set()
    for kernel in kernels:
        tune_quickly(kernel)

    def scan(a: Tensor, b: Tensor) -> Tensor:
        kind = b.shape[2], b.requires_grad
        if kind not in known:
            few = [x[:, :1024].detach().contiguous().requires_grad_(x.requires_grad) for x in (b, a)]
            h = hgrn(*few)[0]
            if b.requires_grad:
                h.backward(torch.ones_like(h))
            known.add(kind)
        return hgrn(b, a)[0]

    return scan


def hgrn_recurrent() -> Scan:
    from fla.ops.hgrn import fused_recurrent as module

    kernels = module.fused_recurrent_hgrn_fwd_kernel, module.fused_recurrent_hgrn_bwd_kernel
    return tuned(module.fused_recurrent_hgrn, *kernels)


def hgrn_chunk() -> Scan:
    from fla.ops.hgrn import chunk as module

    return tuned(module.chunk_hgrn, module.chunk_hgrn_fwd_kernel_h, module.chunk_hgrn_bwd_kernel_h)


PEERS = {
    ASSOCIATIVE: Peer("torch", lambda: scan_of_torch, training=training_of_torch),
    TRITON: Peer("accelerated_scan", accelerated_triton, TIME_LAST),
    WARP: Peer("accelerated_scan", accelerated_warp, TIME_LAST, powers_of_two=(32, 65536)),
    RECURRENT: Peer("fla", hgrn_recurrent, BATCH_FIRST, of_log=True),
    CHUNK: Peer("fla", hgrn_chunk, BATCH_FIRST, of_log=True),
}


# ---- scan ------------------------------------------------------------------------------------------------


def start_to_build_warp() -> subprocess.Popen[Any]:
    """The first import of accelerated_scan.warp compiles its CUDA code for most of a minute."""
    command = [sys.executable, "-c", "import accelerated_scan.warp"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def loaded_peers(run: Run, build: subprocess.Popen[Any]) -> dict[str, Function]:
    """The scans of the peers that are installed and can be imported, ``build`` of WARP being done."""
    found: dict[str, Function] = {}
    for name, peer in PEERS.items():
        try:
            if not peer.is_installed:
                raise NotMeasuredError("not installed")
            if name == WARP and build.wait(max(1, run.end - time.monotonic())) != 0:
                raise NotMeasuredError("`import accelerated_scan.warp` fails")
            found[name] = peer.load()
        except Exception as error:
            run.failures[name] = message(error)
    return found


def call_of(scan: Function, mode: str, peer: Peer | None = None) -> Function:
    """A call with a, b and the gradient of h: the first arguments, or as the peer takes them."""

    def call(*arguments: Any) -> Any:
        a, b, grad = arguments[3][peer.takes] if peer else arguments[:3]
        if mode == "forward":
            return scan(a, b)
        if peer and peer.training:
            return peer.training(a, b, grad)
        return trained(scan, (a, b), grad)

    return call


def check_of(peer: Peer, expected: Sequence[Tensor], a: Tensor) -> Function:
    """Compares the first and last steps of h, or of the gradients of a and b."""

    def check(result: Any) -> str | None:
        found = [peer.time_first(x) for x in (result if isinstance(result, tuple) else (result,))]
        for i, (x, wanted) in enumerate(zip(found, expected, strict=True)):
            is_scaled = peer.of_log and i == 0 and len(found) == 2
            for t in (0, -1):
                y = wanted[t] * a[t] if is_scaled else wanted[t]
                if (x[t] - y).abs().max() > 1e-3 * wanted[[0, -1]].abs().max():
                    what = "h" if len(found) == 1 else ("the gradient of a", "the gradient of b")[i]
                    return f"{what} differs from ours"
        return None

    return check


def scans(run: Run, peers: dict[str, Function], sizes: Sizes, mode: str) -> list[Row]:
    device, moved = run.bench.device, sizes.elements * BYTES["scan"][mode]
    what = f"scan, {mode} at {sizes}"
    asked = {}
    for name in peers:
        if why := PEERS[name].refuses(sizes.steps):
            run.failures[f"{what}, {name}"] = why
        else:
            asked[name] = PEERS[name]

    def make() -> tuple[Any, ...]:
        shape = sizes.steps, sizes.batch, sizes.hidden
        given = torch.rand(shape, device=device), *(torch.randn(shape, device=device) for _ in range(2))
        layouts = {peer.takes: peer for peer in asked.values()}
        return *given, {key: peer.arguments(*given) for key, peer in layouts.items()}

    sets = make_sets(run.bench, moved, make)
    calls = {OURS: call_of(lltm_ext.scan, mode), COPY: copy}
    calls |= {name: call_of(peers[name], mode, peer) for name, peer in asked.items()}
    expected = calls[OURS](*sets[0])
    expected = expected if isinstance(expected, tuple) else (expected,)
    checks = {name: check_of(peer, expected, sets[0][0]) for name, peer in asked.items()}
    return [row_of("scan", mode, sizes, moved, run.times(what, calls, sets, checks))]


# ---- a constant a ----------------------------------------------------------------------------------------


def lfilter_of_decay(device: torch.device) -> Function:
    """torchaudio's lfilter of h_t = DECAY h_{t-1} + b_t, for b [channels, T]."""
    from torchaudio.functional import filtering

    if not filtering._IS_TORCHAUDIO_EXT_AVAILABLE:
        raise NotMeasuredError("torchaudio lacks its extension")
    a, b = torch.tensor([1.0, -DECAY], device=device), torch.tensor([1.0, 0.0], device=device)
    return lambda x: filtering.lfilter(x, a, b, clamp=False)


def constant_a(run: Run, sizes: Sizes, mode: str) -> list[Row]:
    device, moved = run.bench.device, sizes.elements * BYTES["constant a"][mode]
    what = f"constant a, {mode} at {sizes}"

    def make() -> tuple[Tensor, ...]:
        shape = sizes.steps, sizes.batch, sizes.hidden
        given = tuple(torch.randn(shape, device=device) for _ in range(2))
        return *given, *(x.flatten(1).t().contiguous() for x in given)

    def of(scan: Function, first: int) -> Function:
        def call(*arguments: Any) -> Any:
            b, grad = arguments[first : first + 2]
            return scan(b) if mode == "forward" else trained(scan, (b,), grad)

        return call

    calls: dict[str, Function] = {OURS: of(lambda b: lltm_ext.scan(DECAY, b), 0), COPY: copy}
    try:
        if importlib.util.find_spec("torchaudio") is None:
            raise NotMeasuredError("not installed")
        calls[LFILTER] = of(lfilter_of_decay(device), 2)
    except Exception as error:
        run.failures[LFILTER] = message(error)
    sets = make_sets(run.bench, moved, make)
    expected = calls[OURS](*sets[0])

    def check(result: Any) -> str | None:
        """Of the last step of h, or the first one of the gradient of b. lfilter rounds b to TF32."""
        t, of = (-1, lambda x: x) if mode == "forward" else (0, lambda x: x[0])
        near = torch.allclose(of(result)[:, t], of(expected)[t].flatten(), rtol=0, atol=2e-2)
        return None if near else "the result differs from ours"

    return [row_of("constant a", mode, sizes, moved, run.times(what, calls, sets, {LFILTER: check}))]


# ---- advantages ------------------------------------------------------------------------------------------


def difference(reward: Tensor, value: Tensor, last_value: Tensor, done: Tensor) -> Tensor:
    next_value = torch.cat([value[1:], last_value[None]])
    return reward + GAMMA * next_value.masked_fill(done, 0) - value


def advantage(delta: Tensor, done: Tensor) -> Tensor:
    return lltm_ext.scan(GAMMA * DECAY, delta, reset=done, reverse=True)


def advantage_of_torch(delta: Tensor, done: Tensor) -> Tensor:
    return states((~done) * (GAMMA * DECAY), delta, reverse=True)


def gae(reward: Tensor, value: Tensor, last_value: Tensor, done: Tensor) -> Tensor:
    return advantage(difference(reward, value, last_value, done), done)


def gae_of_torch(reward: Tensor, value: Tensor, last_value: Tensor, done: Tensor) -> Tensor:
    return advantage_of_torch(difference(reward, value, last_value, done), done)


@functools.cache
def triton_gae() -> Callable[..., Tensor]:
    """GAE of rewards, values and dones [B, T] and last values [B]. A program has a row, as in rl-triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def combine_steps(a, b, next_a, next_b):
        return next_a * a, next_a * b + next_b

    @triton.jit
    def gae_kernel(reward, value, done, last_value, advantage, steps, gamma, lam, STEPS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * steps
        t = steps - 1 - tl.arange(0, STEPS)
        here = t >= 0
        going_on = 1.0 - tl.load(done + row + t, here, 1).to(tl.float32)
        after = tl.load(value + row + t + 1, here & (t + 1 < steps), 0.0)
        after = tl.where(t + 1 < steps, after, tl.load(last_value + tl.program_id(0)))
        delta = tl.load(reward + row + t, here, 0.0) + gamma * after * going_on
        delta -= tl.load(value + row + t, here, 0.0)
        _, found = tl.associative_scan((gamma * lam * going_on, delta), 0, combine_steps)
        tl.store(advantage + row + t, found, here)

    def gae(reward: Tensor, value: Tensor, last_value: Tensor, done: Tensor, *factors: float) -> Tensor:
        advantage = torch.empty_like(reward)
        rows, steps = reward.shape
        block = triton.next_power_of_2(steps)
        warps = max(1, min(32, block // 512))
        gae_kernel[(rows,)](
            reward, value, done, last_value, advantage, steps, *factors, STEPS=block, num_warps=warps
        )
        return advantage

    return gae


def advantages(run: Run, sizes: Sizes) -> list[Row]:
    """Advantages of rewards and values [T, B], whose episodes have 100 steps on average."""
    device, cuda = run.bench.device, run.bench.cuda

    def make() -> tuple[Any, ...]:
        shape = sizes.steps, sizes.batch
        reward, value = (torch.randn(shape, device=device) for _ in range(2))
        last_value, done = torch.randn(sizes.batch, device=device), torch.rand(shape, device=device) < 0.01
        given = reward, value, last_value, done
        rows = [x.t().contiguous() if x.dim() == 2 else x for x in given]
        return *given, difference(*given), rows

    of_differences: dict[str, Function] = {OURS: lambda *x: advantage(x[4], x[3]), COPY: copy}
    of_rewards: dict[str, Function] = {OURS: lambda *x: gae(*x[:4]), COPY: copy}
    if cuda:
        of_differences[ASSOCIATIVE] = lambda *x: compiled(advantage_of_torch)(x[4], x[3])
        of_rewards[OURS_COMPILED] = lambda *x: compiled(gae)(*x[:4])
        of_rewards[ASSOCIATIVE] = lambda *x: compiled(gae_of_torch)(*x[:4])
        of_rewards[TRITON_GAE] = lambda *x: triton_gae()(*x[5], GAMMA, DECAY)
    rows = []
    for mode, calls in (("of differences", of_differences), ("of rewards", of_rewards)):
        moved = sizes.elements * BYTES["GAE"][mode]
        sets = make_sets(run.bench, moved, make)
        expected = calls[OURS](*sets[0])

        def check(result: Tensor, expected: Tensor = expected) -> str | None:
            found = result if result.shape == expected.shape else result.t()
            near = torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
            return None if near else "the advantages differ from ours"

        times = run.times(f"GAE, {mode} at {sizes}", calls, sets, dict.fromkeys(calls.keys() - {COPY}, check))
        rows.append(row_of("GAE", mode, sizes, moved, times))
    return rows


# ---- cells -----------------------------------------------------------------------------------------------


def bytes_of_cell(cell: Any, mode: str) -> int:
    """What a unit has to move in a step. Forward reads its gates and writes h. Backward reads the gates, h,
    the other states, which forward has to write for it, and the gradient of h; it writes those of the gates.
    It can compute all else again, so it counts nothing else that a forward may save."""
    forward = cell.gates + 1
    if mode == "forward":
        return 4 * forward
    derived = cell.derived
    read = set(ancestors([node for nodes in derived.gradients.values() for node in nodes]))
    gates, h, others = (len(read.intersection(derived.leaves[k])) for k in ("x", "h", "s"))
    saved, grad_h = others, 1
    return 4 * (forward + saved + gates + h + others + grad_h + cell.gates)


def cell_without_product(run: Run, cell: Any, sizes: Sizes, mode: str) -> list[Row]:
    device, moved = run.bench.device, sizes.elements * bytes_of_cell(cell, mode)
    hidden = sizes.hidden
    zeros = torch.zeros(sizes.batch, hidden, device=device)
    hx = (zeros,) * (1 + len(cell.states)) if cell.states else zeros
    parameters = {name: torch.full((hidden,), DECAY, device=device) for name in cell.parameters}

    def make() -> tuple[Tensor, Tensor]:
        x = torch.randn(sizes.steps, sizes.batch, cell.gates * hidden, device=device)
        return x, torch.randn(sizes.steps, sizes.batch, hidden, device=device)

    def run_cell(x: Tensor, *values: Tensor) -> Tensor:
        return cell(x, hx, None, **dict(zip(parameters, values, strict=True)))[0]

    def call(x: Tensor, grad: Tensor, _: Half) -> Any:
        if mode == "forward":
            return run_cell(x, *parameters.values())
        return trained(run_cell, (x, *parameters.values()), grad)

    sets = make_sets(run.bench, moved, make)
    times = run.times(f"{cell.__name__}, {mode} at {sizes}", {OURS: call, COPY: copy}, sets)
    return [{"cell": cell.__name__} | row_of("cells", mode, sizes, moved, times)]


# ---- the summary -----------------------------------------------------------------------------------------

MODES = ("forward", "training")
SCAN_NAMES = (OURS, COPY, *PEERS)
GAE_NAMES = (OURS, OURS_COMPILED, COPY, ASSOCIATIVE, TRITON_GAE)


def of_names(names: Sequence[str]) -> list[str]:
    return [f"{name} ms" for name in names] + [f"/ {name}" for name in names if name != OURS]


COLUMNS = {
    "scan": ["mode", "(B, T, H)", "MB", *of_names(SCAN_NAMES)],
    "constant a": ["mode", "(B, T, H)", "MB", *of_names((OURS, COPY, LFILTER))],
    "GAE": ["mode", "(B, T, H)", "MB", *of_names(GAE_NAMES)],
    "cells": ["cell", "mode", "(B, T, H)", "MB", *of_names((OURS, COPY))],
}


def claims(rows: Sequence[Row], failures: Mapping[str, str]) -> list[str]:
    found = []
    for part in COLUMNS:
        of_part = [row for row in rows if row["part"] == part]
        for mode in dict.fromkeys(row["mode"] for row in of_part):
            here = [row for row in of_part if row["mode"] == mode]
            for least, most, range_ in ((400, 1e9, "from 400 MB on"), (100, 400, "from 100 to 400 MB")):
                ratios = [row["/ copy"] for row in here if "/ copy" in row and least <= row["MB"] < most]
                if ratios:
                    found.append(
                        f"{part}, {mode}, {range_}: at most {max(ratios):.2f} x a copy of the same bytes"
                    )
            for name in (*PEERS, LFILTER, OURS_COMPILED, TRITON_GAE):
                ratios = [row[f"/ {name}"] for row in here if f"/ {name}" in row]
                if ratios:
                    found.append(f"{part}, {mode}: {min(ratios):.2f} to {max(ratios):.2f} x {name}")
    return found + [f"not measured: {what}: {why}" for what, why in failures.items()]


LIBRARIES = {
    OURS: (OURS,),
    ASSOCIATIVE: (ASSOCIATIVE,),
    "accelerated-scan, its faster kernel": (TRITON, WARP),
    "HGRN, its faster kernel": (RECURRENT, CHUNK),
}


def draw(record: Row) -> Any:
    """For each mode and size, the times over that of a copy: scans above, cells below."""
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(12, 8), sharey="row", layout="constrained")
    for panels, part, draw_rows in zip(grid, ("scan", "cells"), (draw_scans, draw_cells), strict=True):
        of_part = [row for row in record["rows"] if row["part"] == part and "copy ms" in row]
        sizes = list(dict.fromkeys(row["(B, T, H)"] for row in of_part))
        for axes, mode in zip(panels, MODES, strict=True):
            draw_rows(axes, [row for row in of_part if row["mode"] == mode], sizes)
            axes.set_yticks(range(len(sizes)), sizes)
            axes.axvline(1, color=INK, linewidth=0.8)
            axes.set_xscale("log")
            axes.set_xlabel("time / that of a copy of the same bytes")
            axes.set_title(f"{part}, {mode}, float32")
            axes.grid(axis="y", visible=False)
        panels[0].invert_yaxis()
        panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_scans(axes: Any, rows: Sequence[Row], sizes: Sequence[str]) -> None:
    for i, (library, names) in enumerate(LIBRARIES.items()):
        points = []
        for row in rows:
            times = [row[f"{name} ms"] for name in names if f"{name} ms" in row]
            if times:
                points.append((sizes.index(row["(B, T, H)"]) + 0.2 * i - 0.3, min(times) / row["copy ms"]))
        at, ratios = [y for y, _ in points], [x for _, x in points]
        axes.barh(at, ratios, 0.19, color=(OUR_COLOR, *COLORS)[i], label=library)


def draw_cells(axes: Any, rows: Sequence[Row], sizes: Sequence[str]) -> None:
    for cell, marker in zip(CELLS, "osD^vx", strict=True):
        here = [row for row in rows if row["cell"] == cell.__name__ and "/ copy" in row]
        at, ratios = [sizes.index(row["(B, T, H)"]) for row in here], [row["/ copy"] for row in here]
        axes.plot(ratios, at, marker, color=OUR_COLOR, alpha=0.7, label=cell.__name__)


# ---- all -------------------------------------------------------------------------------------------------


def all_cells(run: Run, sizes: Sequence[Sizes], least: float) -> list[Row]:
    """Of sizes at which they move at least some bytes."""
    found: list[Row] = []
    for here, cell, mode in itertools.product(sizes, CELLS, MODES):
        if here.elements * bytes_of_cell(cell, mode) >= least:
            found += run.rows(cell_without_product, cell, here, mode)
    return found


def all_modes(run: Run, measure: Callable[..., list[Row]], sizes: Sequence[Sizes], *given: Any) -> list[Row]:
    return [row for mode in MODES for here in sizes for row in run.rows(measure, *given, here, mode)]


def main() -> None:
    args = parse(__doc__ or "")
    run = Run(Bench(args.device, args.seconds))
    sizes, sample, of_gae = (SMALL, [], SMALL[0]) if args.small else (FULL, some_random(6), OF_GAE)
    least = 0 if args.small else 1e8
    build = start_to_build_warp() if run.bench.cuda else None
    rows = run.rows(advantages, of_gae)
    rows += all_cells(run, sizes, least)
    rows += all_modes(run, constant_a, sizes)
    rows += all_cells(run, sample, least)
    peers = loaded_peers(run, build) if build else {}  # last: a peer may leave the device unusable
    rows += all_modes(run, scans, sample, peers)
    rows += all_modes(run, scans, sizes, peers)
    finish("scan", args, rows, COLUMNS, claims(rows, run.failures))


if __name__ == "__main__":
    main()
