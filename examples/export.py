"""Export a model trained by examples/char_lm.py for programs without its code, or without Python.

    python examples/char_lm.py                # writes build/char_lm/char_lm.pt
    python examples/export.py                 # writes build/char_lm/char_lm.pt2
    build/examples/run_exported build/char_lm/char_lm.pt2 "The "    # to build it: docs/cpp.md

torch.export turns the model into a graph of ops, ours included, for any batch and any length. AOTInductor
compiles the graph into a package, for the GPU if there is one, else for the CPU. The script then loads the
package, compares it with the model, and generates three texts. The C++ program generates the same texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from char_lm import CharLM, encode
from torch import Tensor
from torch.export import Dim
from torch.utils._pytree import tree_leaves

State = tuple[Tensor, Tensor]
Model = Callable[[Tensor, State], tuple[Tensor, State]]

TEXTS, LENGTH = 3, 120  # as in cpp/run_exported.cpp
TOLERANCE = 1e-4


def state(model: CharLM, batch: int) -> State:
    """The state before the first character."""
    shape, device = (1, batch, model.layer.hidden_size), model.head.weight.device
    # Two tensors: torch.export makes one input of the same tensor given twice.
    return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


def export(model: CharLM) -> torch.export.ExportedProgram:
    length, batch = Dim("length"), Dim("batch")
    characters = torch.zeros(5, 2, dtype=torch.int64, device=model.head.weight.device)
    return torch.export.export(
        model,
        (characters, state(model, 2)),
        dynamic_shapes=({0: length, 1: batch}, ({1: batch}, {1: batch})),
    )


def package(model: CharLM, vocabulary: str, path: Path) -> None:
    # A program reads these from the package.
    metadata = {"vocabulary": vocabulary, "hidden_size": str(model.layer.hidden_size)}
    torch._inductor.aoti_compile_and_package(
        export(model), package_path=str(path), inductor_configs={"aot_inductor.metadata": metadata}
    )


def largest_difference(exported: Model, model: CharLM, vocabulary: str) -> float:
    """Of the logits and the new states, over several lengths, batches and states."""
    device, differences = model.head.weight.device, []
    for length, batch in ((1, 1), (1, 8), (100, 1), (33, 17)):
        characters = torch.randint(len(vocabulary), (length, batch), device=device)
        h, c = (torch.randn_like(x) for x in state(model, batch))
        outputs = (tree_leaves(run(characters, (h, c))) for run in (exported, model))
        differences += [(ours - theirs).abs().max() for ours, theirs in zip(*outputs, strict=True)]
    return torch.stack(differences).max().item()


def write(model: Model, prompt: Tensor, hx: State, vocabulary: str) -> tuple[list[str], float]:
    """(continuations of the prompt, the model's mean cross entropy of their characters in bits)"""
    # The prompt is a sequence with a batch of one. Then each step is a batch of texts.
    logits, (h, c) = model(prompt[:, None], hx)
    logits, h, c = (x.expand(-1, TEXTS, -1).contiguous() for x in (logits, h, c))
    texts = ["".join(vocabulary[i] for i in prompt)] * TEXTS
    torch.manual_seed(0)
    bits = 0.0
    for _ in range(LENGTH):
        probabilities = logits[-1].double().cpu().softmax(-1)
        chosen = probabilities.multinomial(1)
        bits -= probabilities.gather(1, chosen).log2().sum().item()
        texts = [text + vocabulary[i] for text, i in zip(texts, chosen, strict=True)]
        logits, (h, c) = model(chosen.view(1, TEXTS).to(prompt.device), (h, c))
    return texts, bits / (TEXTS * LENGTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("build/char_lm/char_lm.pt"), metavar="FILE")
    parser.add_argument("--prompt", default="The ", help="start of the texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not args.checkpoint.is_file():
        parser.error(f"there is no {args.checkpoint}. Run: python examples/char_lm.py")
    saved = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
    vocabulary = saved["vocabulary"]
    model = CharLM(len(vocabulary), saved["hidden_size"]).to(args.device).eval().requires_grad_(False)
    model.load_state_dict(saved["state_dict"])

    path = args.checkpoint.with_suffix(".pt2")
    package(model, vocabulary, path)
    exported = torch._inductor.aoti_load_package(str(path))
    prompt = encode(args.prompt, vocabulary).to(args.device)
    texts, bits = write(exported, prompt, state(model, 1), vocabulary)
    print(*(f"{text}\n----" for text in texts), f"{bits:.6f} bits/char", sep="\n")

    difference = largest_difference(exported, model, vocabulary)
    print(f"package:     {path}, for {args.device}")
    print(f"outputs:     differ from the model's by at most {difference:.1g} (tolerance {TOLERANCE:g})")
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
