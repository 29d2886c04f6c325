"""Train a character language model with `LSTM` and with a cell that is written here, next to `nn.LSTM`.

    python examples/char_lm.py                       # on the text of Python's manual: nothing to download
    python examples/char_lm.py --text my_book.txt --hidden-size 512 --steps 5000

The three are trained one after the other on the same data, both LSTMs from the same start. A table and
loss.png show how well and how fast each learns. The exit status is 1 if the curves of the LSTMs disagree.
The own cell is the function `two_speeds`: change it and run again, nothing has to be built
(docs/own_cell.md). Writes char_lm.pt (the model with `LSTM`, and its vocabulary), loss.png and sample.txt to
--out.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lltm_ext

BITS = 1 / math.log(2)
SMOOTHED = 20  # steps of a mean, in the table and the picture
FIRST_STEPS_TOLERANCE, TOLERANCE = 1e-3, 0.1  # allowed difference of the two curves, bits/char


# ---- the model -----------------------------------------------------------------------------------


@lltm_ext.recurrence(gates=3, states=("fast", "slow"), parameters={"rate": 3.0})
def two_speeds(x, s, p):
    """A unit has two memories: one that a gate overwrites, and a mean of it over a time that is learnt."""
    keep, write, read = torch.sigmoid(x[0]), torch.tanh(x[1]), torch.sigmoid(x[2])
    fast = keep * s.fast + (1 - keep) * write
    slowness = torch.sigmoid(p.rate)
    slow = slowness * s.slow + (1 - slowness) * fast
    return read * torch.tanh(fast + slow), (fast, slow)


OURS, TORCHS = "lltm_ext.LSTM", "nn.LSTM"
LAYERS = {
    TORCHS: nn.LSTM,
    OURS: lltm_ext.LSTM,
    "own: two_speeds": functools.partial(lltm_ext.Recurrent, two_speeds),
}


class CharLM(nn.Module):
    """Characters [T, B] in, logits of the next character [T, B, vocabulary] out."""

    def __init__(
        self, vocabulary_size: int, hidden_size: int, layer: Callable[..., nn.Module] = lltm_ext.LSTM
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, hidden_size)
        self.layer = layer(hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, characters: Tensor, hx: Any = None):
        output, hx = self.layer(self.embed(characters), hx)
        return self.head(output), hx


# ---- the text ------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A text as indices into its vocabulary. The last tenth is for validation."""

    vocabulary: str
    train: Tensor
    validation: Tensor


def read_text(path: Path | None) -> tuple[str, str]:
    """(text, its name)"""
    if path is None:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
        # Topics share paragraphs. Keep one of each, so that validation text never occurs in training text.
        return "\n\n".join(dict.fromkeys(paragraphs)), "the Python manual (pydoc_data.topics)"
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"char_lm: cannot read --text {path} as UTF-8: {error}") from error


def encode(text: str, vocabulary: str) -> Tensor:
    index = {character: i for i, character in enumerate(vocabulary)}
    return torch.tensor([index[character] for character in text])


def split(text: str, length: int, device: torch.device) -> Corpus:
    vocabulary = "".join(sorted(set(text)))
    indices = encode(text, vocabulary).to(device)
    at = len(indices) * 9 // 10
    if len(indices) - at <= length:
        raise SystemExit(
            f"char_lm: the text has {len(text)} characters; --length {length} needs {10 * length + 10}"
        )
    return Corpus(vocabulary, indices[:at], indices[at:])


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, [length, len(starts)], and for each character the next one."""
    offsets = torch.arange(length + 1, device=text.device)
    window = text[offsets[:, None] + starts.to(text.device)]
    return window[:-1], window[1:]


def batches(text: Tensor, args: argparse.Namespace, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces of the text, the same in each call."""
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - args.length, (args.batch_size,), generator=generator)
        yield windows(text, starts, args.length)


# ---- training ------------------------------------------------------------------------------------


class Run(NamedTuple):
    model: CharLM
    bits: list[float]  # a character, at each step
    seconds: list[float]  # from the start to the end of each step
    characters_per_second: float


def bits_per_character(model: CharLM, characters: Tensor, following: Tensor) -> Tensor:
    logits, _ = model(characters)
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()) * BITS


def train(
    name: str,
    layer: Callable[..., nn.Module],
    corpus: Corpus,
    args: argparse.Namespace,
    steps: int,
    quiet: bool = False,
) -> Run:
    from tqdm import tqdm

    torch.manual_seed(args.seed)  # both LSTMs start from the same parameters
    model = CharLM(len(corpus.vocabulary), args.hidden_size, layer).to(corpus.train.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    bits, seconds, per_step, start = [], [], args.length * args.batch_size, time.perf_counter()
    with tqdm(total=steps, desc=f"{name:<15}", unit="step", dynamic_ncols=True, disable=quiet) as bar:
        for step, (characters, following) in enumerate(batches(corpus.train, args, steps)):
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - step / args.steps)
            loss = bits_per_character(model, characters, following)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bits.append(loss.item())
            seconds.append(time.perf_counter() - start)
            rate = (step + 1) * per_step / seconds[-1]
            bar.set_postfix_str(f"{bits[-1]:.3f} bits/char, {rate:,.0f} chars/s", refresh=False)
            bar.update()
    return Run(model, bits, seconds, rate)


@torch.no_grad()
def validate(model: CharLM, corpus: Corpus, length: int) -> float:
    starts = torch.arange(0, len(corpus.validation) - length, length)
    parts = [
        bits_per_character(model, *windows(corpus.validation, part, length)) for part in starts.split(256)
    ]
    sizes = [len(part) for part in starts.split(256)]
    return sum(part.item() * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)


@torch.no_grad()
def sample(model: CharLM, corpus: Corpus, length: int, args: argparse.Namespace) -> str:
    """The prompt, continued by the model."""
    generator = torch.Generator().manual_seed(args.seed)
    prompt = "".join(c for c in args.prompt if c in corpus.vocabulary) or corpus.vocabulary[-1]
    written, unread, hx = prompt, prompt, None
    for _ in range(length):
        characters = encode(unread, corpus.vocabulary).to(corpus.train.device)
        logits, hx = model(characters[:, None], hx)
        probabilities = F.softmax(logits[-1, 0].double().cpu() / args.temperature, dim=0)
        unread = corpus.vocabulary[int(torch.multinomial(probabilities, 1, generator=generator))]
        written += unread
    return written


# ---- the layers, one after the other -------------------------------------------------------------


def train_all(corpus: Corpus, args: argparse.Namespace) -> dict[str, Run]:
    runs = {}
    for name, layer in LAYERS.items():
        train(name, layer, corpus, args, min(args.steps, 3), quiet=True)  # loads libraries, compiles the cell
        runs[name] = train(name, layer, corpus, args, args.steps)
    print(f"\n{'':<15}{'training':>10}{'validation':>12}{'chars/s':>14}{'seconds':>10}")
    for name, run in runs.items():
        validation = validate(run.model, corpus, args.length)
        speed = f"{run.characters_per_second:>14,.0f}{run.seconds[-1]:>10.1f}"
        print(f"{name:<15}{smooth(run.bits)[-1]:>10.3f}{validation:>12.3f}{speed}")
    print(f"training and validation in bits/char, training over the last {min(SMOOTHED, args.steps)} steps\n")
    return runs


def smooth(bits: list[float]) -> list[float]:
    """Running means of up to SMOOTHED values."""
    windows = (bits[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(bits)))
    return [sum(window) / len(window) for window in windows]


# ---- checks --------------------------------------------------------------------------------------


def curves_agree(ours: Run, torchs: Run) -> bool:
    """The first ten steps differ only by rounding. Training then amplifies the difference."""
    differences = [abs(a - b) for a, b in zip(ours.bits, torchs.bits, strict=True)]
    first, largest = max(differences[:10]), max(differences)
    agree = first <= FIRST_STEPS_TOLERANCE and largest <= TOLERANCE
    print(
        f"curves:      {'agree' if agree else 'DISAGREE'}: they differ by at most\n"
        f"             {first:.1g} bits/char over the first 10 steps (tolerance {FIRST_STEPS_TOLERANCE:g}),\n"
        f"             {largest:.2g} bits/char over all {len(differences)} (tolerance {TOLERANCE:g})"
    )
    return agree


def checkpoint_is_right(model: CharLM, corpus: Corpus, args: argparse.Namespace, path: Path) -> bool:
    """Saves the model, loads it into a new one and compares their outputs."""
    torch.save(
        {"state_dict": model.state_dict(), "vocabulary": corpus.vocabulary, "hidden_size": args.hidden_size},
        path,
    )
    saved = torch.load(path, map_location=corpus.train.device, weights_only=True)
    loaded = CharLM(len(saved["vocabulary"]), saved["hidden_size"]).to(corpus.train.device)
    loaded.load_state_dict(saved["state_dict"])
    characters = corpus.validation[: args.length, None]
    with torch.no_grad():
        same = torch.equal(model(characters)[0], loaded(characters)[0])
    print(f"checkpoint:  {path} {'loads and gives the same output' if same else 'GIVES ANOTHER OUTPUT'}")
    return same


# ---- the picture ---------------------------------------------------------------------------------


def draw(runs: dict[str, Run], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    styles = (("#e8a33d", 3), ("#2463a8", 1.4), ("#2a8a5f", 1.4))  # the LSTMs' curves coincide
    for (name, run), (color, width) in zip(runs.items(), styles, strict=True):
        curve = smooth(run.bits)
        left.plot(range(1, len(curve) + 1), curve, color=color, linewidth=width, label=name)
        right.plot(run.seconds, curve, color=color, linewidth=width, label=name)
    left.set(xlabel="steps", ylabel=f"bits per character, mean of {SMOOTHED} steps")
    right.set(xlabel="seconds")
    left.legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- the command ---------------------------------------------------------------------------------


def training_options(description: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    text = "a UTF-8 text file (default: the text of Python's manual)"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--length", type=int, default=64, help="characters in a training sequence")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--out", type=Path, default=Path(out), help="output folder")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for name in ("steps", "hidden_size", "length", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here (nvidia-smi says whether the driver does)")
    return args


def arguments() -> argparse.Namespace:
    parser = training_options(__doc__.split("\n")[0], "build/char_lm")
    parser.set_defaults(steps=400)
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample: lower is less random")
    parser.add_argument("--prompt", default="The ", help="start of the sample")
    return checked(parser)


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU, {threads} thread{'s' * (threads > 1)}"


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    text, source = read_text(args.text)
    corpus = split(text, args.length, args.device)
    on = name_of(args.device)
    print(f"{source}: {len(text):,} characters, {len(corpus.vocabulary)} different; on {on}")
    title = f"{source}\n{args.hidden_size} hidden, {args.length} characters x {args.batch_size}, {on}"
    torch.backends.cudnn.allow_tf32 = False  # whose rounding differs between two implementations
    runs = train_all(corpus, args)
    ours = runs[OURS]
    written = sample(ours.model, corpus, 400, args)
    (args.out / "sample.txt").write_text(written, encoding="utf-8")
    print(f"{written}\n")
    draw(runs, title, args.out / "loss.png")
    print(f"picture:     {args.out / 'loss.png'}")
    right = checkpoint_is_right(ours.model, corpus, args, args.out / "char_lm.pt")
    return 0 if curves_agree(ours, runs[TORCHS]) and right else 1


if __name__ == "__main__":
    sys.exit(main())
