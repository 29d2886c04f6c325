"""Models of other libraries: training steps with torch's recurrent layers, and converted by from_torch.

    python -m pip install openunmix demucs fastai transformers speechbrain torchrl sb3-contrib "darts[torch]"
    python benchmarks/libraries.py

A library that is not installed is named at the end. Data are random, float32, in torch's default settings.
docs/libraries.md has the same models in small sizes.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import INK, OUR_COLOR, Bench, Row, finish, parse
from torch import Tensor, nn
from torch.nn import functional as F

import lltm_ext

Convert = Callable[[nn.Module], nn.Module]
Step = Callable[[], Any]  # trains, and returns the loss, or None where it can't be compared
CONVERSIONS: dict[str, Convert] = {"peer": lambda model: model, "ours": lltm_ext.from_torch}


def training(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """Forward, backward and the optimizer's step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- the models ----------------------------------------------------------------------------------


def openunmix(
    device: torch.device, convert: Convert, *, batch: int, frames: int, bins: int, hidden: int
) -> Step:
    from openunmix.model import OpenUnmix

    model = convert(OpenUnmix(nb_bins=bins, hidden_size=hidden).to(device))
    mixture, target = torch.rand(2, batch, 2, bins, frames, device=device)
    return training(model, lambda: F.mse_loss(model(mixture), target))


def demucs(device: torch.device, convert: Convert, *, batch: int, samples: int, channels: int) -> Step:
    """With an LSTM of two layers in the middle, besides those in the encoder's last two levels."""
    from demucs.demucs import Demucs

    sources = ["drums", "bass", "other", "vocals"]
    model = convert(Demucs(sources, channels=channels, lstm_layers=2).to(device))
    mixture = torch.randn(batch, 2, samples, device=device)
    targets = torch.randn(batch, len(sources), 2, samples, device=device)
    return training(model, lambda: F.l1_loss(model(mixture), targets))


def awd_lstm(
    device: torch.device,
    convert: Convert,
    *,
    batch: int,
    steps: int,
    vocabulary: int,
    embedding: int,
    hidden: int,
    layers: int,
) -> Step:
    """A language model. Its states go on from step to step, as in an epoch."""
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model

    config = awd_lstm_lm_config | {"emb_sz": embedding, "n_hid": hidden, "n_layers": layers}
    model = convert(get_language_model(AWD_LSTM, vocabulary, config).to(device))
    model.reset()  # which moves its states to the device
    tokens = torch.randint(vocabulary, (batch, steps + 1), device=device)

    def loss_of() -> Tensor:
        logits = model(tokens[:, :-1])[0]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return training(model, loss_of)


def encodec(device: torch.device, convert: Convert, *, batch: int, samples: int) -> Step:
    """The encoder and decoder at 24 kHz, without the quantizer between them."""
    from transformers import EncodecConfig, EncodecModel

    model = EncodecModel(EncodecConfig()).to(device)
    convert(model)
    audio = torch.randn(batch, 1, samples, device=device)
    return training(model, lambda: F.l1_loss(model.decoder(model.encoder(audio)), audio))


def speechbrain(
    device: torch.device,
    convert: Convert,
    *,
    layer: str,
    with_lengths: bool,
    batch: int,
    frames: int,
    features: int,
    hidden: int,
    layers: int,
) -> Step:
    """With lengths, of half to all frames, the library packs the sequences."""
    from speechbrain.nnet import RNN

    input = torch.randn(batch, frames, features, device=device)
    model = getattr(RNN, layer)(hidden, input.shape, num_layers=layers, bidirectional=True)
    model = convert(model.to(device))
    lengths = torch.linspace(0.5, 1, batch, device=device) if with_lengths else None
    return training(model, lambda: model(input, lengths=lengths)[0].square().mean())


def torchrl(
    device: torch.device,
    convert: Convert,
    *,
    layer: str,
    with_resets: bool,
    batch: int,
    steps: int,
    features: int,
    hidden: int,
) -> Step:
    """With resets, an episode has 50 steps on average."""
    from tensordict import TensorDict
    from torchrl import modules

    states = ["h", "c"] if layer == "LSTM" else ["h"]
    model = getattr(modules, f"{layer}Module")(
        features,
        hidden,
        in_keys=["x", *states],
        out_keys=["y", *(("next", state) for state in states)],
        default_recurrent_mode=True,
    )
    model = convert(model.to(device))
    is_init = torch.rand(batch, steps, 1, device=device) < (1 / 50 if with_resets else 0)
    is_init[:, 0] = True
    data = {state: torch.zeros(batch, steps, 1, hidden, device=device) for state in states}
    data |= {"x": torch.randn(batch, steps, features, device=device), "is_init": is_init}
    rollouts = TensorDict(data, batch_size=[batch, steps])
    return training(model, lambda: model(rollouts.clone(False))["y"].square().mean())


def recurrent_ppo(
    device: torch.device,
    convert: Convert,
    *,
    method: str,
    environments: int,
    steps: int,
    batch: int,
    epochs: int,
    hidden: int,
) -> Step:
    """`train` runs the epochs over one rollout of CartPole; `learn` makes the rollout too."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    agent = RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env("CartPole-v1", environments, seed=0),
        n_steps=steps,
        batch_size=batch,
        n_epochs=epochs,
        policy_kwargs={"lstm_hidden_size": hidden},
        seed=0,
        device=device,
    )

    def learn() -> None:  # its losses differ with the actions that the policies draw
        agent.learn(environments * steps, log_interval=None)

    def train() -> float:
        agent.train()
        return agent.logger.name_to_value["train/loss"]

    learn()  # both train on a rollout of the unconverted policy
    convert(agent.policy)
    return {"train": train, "learn": learn}[method]


def block_rnn(
    device: torch.device, convert: Convert, *, windows: int, batch: int, chunk: int, hidden: int, layers: int
) -> Step:
    """`fit` for an epoch, which also makes a trainer."""
    import numpy as np
    from darts import TimeSeries
    from darts.models import BlockRNNModel

    for library in ("darts", "pytorch_lightning"):  # they log at each fit
        logging.getLogger(library).setLevel(logging.ERROR)
    horizon, cuda = 12, device.type == "cuda"
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer |= {"accelerator": "gpu" if cuda else "cpu", "devices": [device.index] if cuda else 1}
    model = BlockRNNModel(
        chunk,
        horizon,
        model="LSTM",
        hidden_dim=hidden,
        n_rnn_layers=layers,
        batch_size=batch,
        random_state=0,
        pl_trainer_kwargs=trainer,
    )
    values = np.random.default_rng(0).standard_normal(windows + chunk + horizon - 1, dtype=np.float32)
    series = TimeSeries.from_values(values)
    model.fit(series, epochs=1)  # builds the network
    convert(model.model)

    def fit() -> Tensor:
        model.fit(series, epochs=1)
        return model.model.trainer.callback_metrics["train_loss"]

    return fit


class Case(NamedTuple):
    """`small` has the sizes that differ on the CPU and with --quick."""

    library: str  # its name on PyPI
    model: str
    build: Callable[..., Step]
    sizes: dict[str, int]
    small: dict[str, int]


SPEECH = {"batch": 16, "frames": 500, "features": 80, "hidden": 512, "layers": 4}
ROLLOUTS = {"batch": 64, "steps": 100, "features": 64, "hidden": 256}
PPO = {"environments": 16, "steps": 64, "batch": 256, "epochs": 2, "hidden": 256}
CASES = (
    Case(
        "openunmix",
        "OpenUnmix",
        openunmix,
        {"batch": 16, "frames": 255, "bins": 2049, "hidden": 512},
        {"batch": 2, "frames": 20, "bins": 65, "hidden": 32},
    ),
    Case(
        "demucs",
        "Demucs",
        demucs,
        {"batch": 4, "samples": 4 * 44100, "channels": 48},
        {"batch": 1, "samples": 8192, "channels": 8},
    ),
    Case(
        "fastai",
        "AWD_LSTM",
        awd_lstm,
        {"batch": 64, "steps": 72, "vocabulary": 10_000, "embedding": 400, "hidden": 1152, "layers": 3},
        {"batch": 4, "steps": 12, "vocabulary": 50, "embedding": 16, "hidden": 24},
    ),
    Case(
        "transformers",
        "EncodecModel",
        encodec,
        {"batch": 8, "samples": 24_000},
        {"batch": 1, "samples": 1600},
    ),
    *(
        Case(
            "speechbrain",
            f"nnet.RNN.{layer}{', lengths' if with_lengths else ''}",
            partial(speechbrain, layer=layer, with_lengths=with_lengths),
            SPEECH,
            {"batch": 2, "frames": 10, "features": 8, "hidden": 16},
        )
        for layer in ("LSTM", "GRU")
        for with_lengths in (False, True)
    ),
    *(
        Case(
            "torchrl",
            f"{layer}Module{', resets' if with_resets else ''}",
            partial(torchrl, layer=layer, with_resets=with_resets),
            ROLLOUTS,
            {"batch": 4, "features": 4, "hidden": 16},
        )
        for layer in ("LSTM", "GRU")
        for with_resets in (False, True)
    ),
    *(
        Case(
            "sb3-contrib",
            f"RecurrentPPO.{method}",
            partial(recurrent_ppo, method=method),
            PPO,
            {"environments": 2, "steps": 16, "batch": 16, "hidden": 16},
        )
        for method in ("train", "learn")
    ),
    Case(
        "darts",
        "BlockRNNModel.fit",
        block_rnn,
        {"windows": 2048, "batch": 128, "chunk": 256, "hidden": 256, "layers": 2},
        {"windows": 32, "batch": 16, "chunk": 12, "hidden": 8},
    ),
)


# ---- measuring -----------------------------------------------------------------------------------


def measure(bench: Bench, case: Case, small: bool) -> Row:
    """Both models start from the same weights, data and random numbers, so that their first losses agree.

    On a GPU OpenUnmix's agree less: torch's layers and ours draw other random numbers for their dropout.
    """
    sizes = case.sizes | (case.small if small else {})
    steps: dict[str, Step] = {}
    losses: dict[str, Any] = {}
    for name, convert in CONVERSIONS.items():
        torch.manual_seed(0)
        steps[name] = case.build(bench.device, convert, **sizes)
        torch.manual_seed(1)
        losses[name] = steps[name]()
    ours, theirs = losses["ours"], losses["peer"]
    row: Row = {
        "library": case.library,
        "version": importlib.metadata.version(case.library),
        "model": case.model,
        "sizes": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
        "loss difference": None if ours is None else abs(float((ours - theirs) / theirs)),
    }
    row |= {f"{name} ms": time for name, time in bench.milliseconds(steps).items()}
    return row | {"ratio": row["ours ms"] / row["peer ms"]}


def is_installed(library: str) -> bool:
    try:
        return bool(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return False


# ---- the summary ---------------------------------------------------------------------------------


def claims(rows: Sequence[Row], missing: Sequence[Case]) -> list[str]:
    found = []
    if ratios := [row["ratio"] for row in rows]:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
        found.append(f"training: {mean:.2f} x (geometric mean of {len(ratios)}; {bounds})")
    return found + [f"not measured: {c.model}, because {c.library} is not installed" for c in missing]


def draw(record: Row) -> Any:
    """A bar for each model: our time in parts of the peer's."""
    from matplotlib import pyplot as plt

    rows = record["rows"][::-1]
    figure, axes = plt.subplots(figsize=(7, 1 + 0.3 * len(rows)), layout="constrained")
    bars = axes.barh(
        [f"{row['library']} {row['model']}" for row in rows],
        [row["ratio"] for row in rows],
        color=OUR_COLOR,
    )
    times = [f"{row['peer ms']:.3g} → {row['ours ms']:.3g} ms" for row in rows]
    axes.bar_label(bars, times, padding=4, color=INK, fontsize=7)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of a training step / with torch's layers, float32")
    return figure


def main() -> None:
    args = parse(__doc__ or "")
    bench = Bench(args.device, 5 * args.seconds)
    installed = [case for case in CASES if is_installed(case.library)]
    rows = [measure(bench, case, args.small) for case in installed]
    columns = ("library", "version", "model", "peer ms", "ours ms", "ratio", "loss difference")
    finish("libraries", args, rows, columns, claims(rows, [case for case in CASES if case not in installed]))


if __name__ == "__main__":
    main()
