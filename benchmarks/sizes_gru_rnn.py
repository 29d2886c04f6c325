"""GRU and RNN beside torch's over the map of sizes of benchmarks/sizes.py."""

from __future__ import annotations

from sizes import GRU, RNN, draw, run

__all__ = ["draw"]

if __name__ == "__main__":
    run("sizes_gru_rnn", __doc__ or "", {"nn.GRU": (GRU,), "nn.RNN": (RNN,)})
