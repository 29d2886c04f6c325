"""Train a recurrent cell that is invented here, next to an LSTM, on the text of examples/char_lm.py.

    python examples/own_cell.py            # on the text of Python's manual: nothing to download
    python examples/own_cell.py --quick    # seconds: a small model, few steps
    python examples/own_cell.py --text my_book.txt --hidden-size 512 --steps 5000

The cell is the function `two_speeds`. Change it and run again: nothing has to be built. Prints how well and
how fast each of the two learns, and draws both curves into compare.png in --out. docs/own_cell.md explains
cells.
"""

from __future__ import annotations

import functools
import sys

import torch
from char_lm import checked, compare, name_of, read_text, split, training_options

import lltm_ext


@lltm_ext.recurrence(gates=3, states=("fast", "slow"), parameters={"rate": 3.0})
def two_speeds(x, s, p):
    """A unit has two memories: one that a gate overwrites, and a mean of it over a time that is learnt."""
    keep, write, read = torch.sigmoid(x[0]), torch.tanh(x[1]), torch.sigmoid(x[2])
    fast = keep * s.fast + (1 - keep) * write
    slowness = torch.sigmoid(p.rate)
    slow = slowness * s.slow + (1 - slowness) * fast
    return read * torch.tanh(fast + slow), (fast, slow)


def main() -> int:
    parser = training_options(__doc__.split("\n")[0], "build/own_cell")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    args = checked(parser)
    if args.quick:
        args.steps, args.hidden_size, args.length, args.batch_size = 60, 64, 32, 16
    args.out.mkdir(parents=True, exist_ok=True)

    print(f"{two_speeds!r}\ngradients agree with finite differences: {two_speeds.gradcheck()}")
    text, source = read_text(args.text)
    corpus, on = split(text, args.length, args.device), name_of(args.device)
    print(f"{source}: {len(text):,} characters, {len(corpus.vocabulary)} different; on {on}")
    title = f"{source}\n{args.hidden_size} hidden, {args.length} characters x {args.batch_size}, {on}"
    layers = {"two_speeds": functools.partial(lltm_ext.Recurrent, two_speeds), "lltm_ext.LSTM": lltm_ext.LSTM}
    compare(layers, corpus, args, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
