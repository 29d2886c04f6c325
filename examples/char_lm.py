"""Train a character language model with the LLTM layer, and show that it learns as in pure PyTorch.

    python examples/char_lm.py                       # on the text of Python's manual: nothing to download
    python examples/char_lm.py --text my_book.txt --hidden-size 512 --steps 5000
    python examples/char_lm.py --compare             # LLTM, lltm_ext.LSTM and nn.LSTM

The same model is trained twice from the same start and on the same data: with `lltm_ext.LLTM`, and with the
pure-PyTorch `lltm_reference`. One picture shows both loss curves, and the exit status is 1 if they disagree.
Writes char_lm.pt (the model and its vocabulary), loss.png and sample.txt to --out.

--compare trains three layers instead, one after the other on the same data. A table and compare.png show how
well and how fast each learns. All compute in float32 with torch's defaults, which let them use TF32.
"""

from __future__ import annotations

import argparse
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
from lltm_ext.lltm import lltm_reference

BITS = 1 / math.log(2)
COMPARED = {"lltm_ext.LLTM": lltm_ext.LLTM, "lltm_ext.LSTM": lltm_ext.LSTM, "nn.LSTM": nn.LSTM}
SMOOTHED = 20  # steps of a mean, in the results of --compare
FIRST_STEPS_TOLERANCE, TOLERANCE = 1e-3, 0.1  # allowed difference of the two curves, bits/char


# ---- the model -----------------------------------------------------------------------------------


class ReferenceLLTM(lltm_ext.LLTM):
    """The same layer with the same parameters, computed by PyTorch's ops, step by step."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None):
        if hx is None:
            zeros = input.new_zeros(1, input.shape[1], self.hidden_size)
            hx = (zeros, zeros)
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_l0)
        output, (h, c) = lltm_reference(input, (hx[0][0], hx[1][0]), *weights)
        return output, (h[None], c[None])


class CharLM(nn.Module):
    """Characters [T, B] in, logits of the next character [T, B, vocabulary] out."""

    def __init__(
        self, vocabulary_size: int, hidden_size: int, layer: Callable[..., nn.Module] = lltm_ext.LLTM
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, hidden_size)
        self.lltm = layer(hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, characters: Tensor, hx: tuple[Tensor, Tensor] | None = None):
        output, hx = self.lltm(self.embed(characters), hx)
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

    torch.manual_seed(args.seed)  # both runs start from the same parameters
    model = CharLM(len(corpus.vocabulary), args.hidden_size, layer).to(corpus.train.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    bits, seconds, per_step, start = [], [], args.length * args.batch_size, time.perf_counter()
    with tqdm(total=steps, desc=f"{name:<22}", unit="step", dynamic_ncols=True, disable=quiet) as bar:
        for step, (characters, following) in enumerate(batches(corpus.train, args, steps)):
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (1 - step / args.steps)
            loss = bits_per_character(model, characters, following)
            optimizer.zero_grad()
            loss.backward()
            # An LLTM has no forget gate: its cell state grows with time, and so can its gradients.
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


# ---- comparison of layers ------------------------------------------------------------------------


def compare(
    layers: dict[str, Callable[..., nn.Module]], corpus: Corpus, args: argparse.Namespace, title: str
) -> None:
    runs = {}
    for name, layer in layers.items():
        train(name, layer, corpus, args, min(args.steps, 3), quiet=True)  # loads libraries
        runs[name] = train(name, layer, corpus, args, args.steps)
    print(f"\n{'':<15}{'training':>10}{'validation':>12}{'chars/s':>14}{'seconds':>10}")
    for name, run in runs.items():
        validation = validate(run.model, corpus, args.length)
        speed = f"{run.characters_per_second:>14,.0f}{run.seconds[-1]:>10.1f}"
        print(f"{name:<15}{smooth(run.bits)[-1]:>10.3f}{validation:>12.3f}{speed}")
    print(f"training and validation in bits/char, training over the last {min(SMOOTHED, args.steps)} steps\n")
    draw_comparison(runs, title, args.out / "compare.png")
    print(f"picture:     {args.out / 'compare.png'}")


def smooth(bits: list[float]) -> list[float]:
    """Running means of up to SMOOTHED values."""
    windows = (bits[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(bits)))
    return [sum(window) / len(window) for window in windows]


# ---- checks --------------------------------------------------------------------------------------


def curves_agree(ours: Run, reference: Run) -> bool:
    """The first ten steps differ only by rounding. Training then amplifies the difference."""
    differences = [abs(a - b) for a, b in zip(ours.bits, reference.bits, strict=False)]
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


# ---- the pictures --------------------------------------------------------------------------------


def subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", **options)


def draw(ours: Run, reference: Run, validation: float, title: str, path: Path) -> None:
    differences = [max(abs(a - b), 1e-9) for a, b in zip(ours.bits, reference.bits, strict=False)]
    figure, (top, bottom) = subplots(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(3, 1))
    steps, floor = len(reference.bits), f"validation, {validation:.2f}"
    top.plot(reference.bits, color="#e8a33d", linewidth=4, alpha=0.7, label=f"pure PyTorch, {steps} steps")
    top.plot(ours.bits, color="#2463a8", linewidth=1, label=f"lltm_ext.LLTM, {len(ours.bits)} steps")
    top.axhline(validation, color="#555555", linewidth=1, linestyle=":", label=floor)
    top.set(ylabel="bits per character", title=title, ylim=(0, None))
    top.legend(frameon=False)
    bottom.semilogy(differences, color="#2463a8", linewidth=0.8)
    bottom.set(xlabel="step", ylabel="|difference|")
    finish(figure, path)


def draw_comparison(runs: dict[str, Run], title: str, path: Path) -> None:
    figure, (left, right) = subplots(1, 2, figsize=(10, 4.2), sharey=True)
    styles = (("#2463a8", 1.4), ("#2a8a5f", 3), ("#e8a33d", 1.4))  # the LSTMs' curves may coincide
    for (name, run), (color, width) in zip(runs.items(), styles, strict=False):
        curve = smooth(run.bits)
        left.plot(range(1, len(curve) + 1), curve, color=color, linewidth=width, label=name)
        right.plot(run.seconds, curve, color=color, linewidth=width, label=name)
    left.set(xlabel="steps", ylabel=f"bits per character, mean of {SMOOTHED} steps")
    right.set(xlabel="seconds")
    left.legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    finish(figure, path)


def finish(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

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
    for name in ("steps", "hidden_size", "length", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here (nvidia-smi says whether the driver does)")
    return args


def arguments() -> argparse.Namespace:
    parser = training_options(__doc__.split("\n")[0], "build/char_lm")
    parser.add_argument("--compare", action="store_true", help="train LLTM, LSTM and nn.LSTM instead")
    steps = "steps of the pure-PyTorch curve, whose training is slower (default: 300)"
    parser.add_argument("--reference-steps", type=int, default=300, help=steps)
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample: lower is less random")
    parser.add_argument("--prompt", default="The ", help="start of the sample")
    args = checked(parser)
    if args.reference_steps < 1:
        parser.error("--reference-steps must be at least 1")
    args.reference_steps = min(args.reference_steps, args.steps)
    return args


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
    if args.compare:
        compare(COMPARED, corpus, args, title)
        return 0

    torch.backends.cudnn.allow_tf32 = False  # the reference's products are not TF32 either
    ours = train("lltm_ext.LLTM", lltm_ext.LLTM, corpus, args, args.steps)
    reference = train("pure-PyTorch reference", ReferenceLLTM, corpus, args, args.reference_steps)
    validation = validate(ours.model, corpus, args.length)
    written = sample(ours.model, corpus, 400, args)
    (args.out / "sample.txt").write_text(written, encoding="utf-8")

    print(f"\n{written}\n")
    print(f"validation:  {validation:.3f} bits/char")
    fast, slow = ours.characters_per_second, reference.characters_per_second
    print(f"speed:       {fast:,.0f} chars/s, the reference {slow:,.0f}: {fast / slow:.1f} x")
    draw(ours, reference, validation, title, args.out / "loss.png")
    print(f"picture:     {args.out / 'loss.png'}")
    right = checkpoint_is_right(ours.model, corpus, args, args.out / "char_lm.pt")
    return 0 if curves_agree(ours, reference) and right else 1


if __name__ == "__main__":
    sys.exit(main())
