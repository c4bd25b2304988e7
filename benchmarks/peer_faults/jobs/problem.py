"""What all the trainings share: samples, a small denoising transformer, its loss, and a log of what was trained on.

Like every training of a diffusion model, the loss draws noise and noise levels from torch's global generator.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES = 40
TOKENS, WIDTH = 16, 256
STEP_SECONDS = 0.25  # a step takes at least so long, so that a fault falls into the step it is meant for


@dataclass(frozen=True)
class JobSettings:
    """Settings of a job, read from a file on the node, as jobs whose configuration is copied to nodes do."""

    lr: float
    steps: int
    every: int  # steps between checkpoints
    global_batch: int
    nan_step: int | None = None  # the loss of this step is not a number on rank 0

    @staticmethod
    def read(path: str) -> JobSettings:
        """Read a JSON file."""
        return JobSettings(**json.loads(Path(path).read_text(encoding="utf-8")))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of shape [TOKENS, WIDTH], each a function of its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"id": torch.tensor(index), "clean": torch.randn(TOKENS, WIDTH, generator=generator)}


class Denoiser(nn.Module):
    """A transformer of about 3 million parameters that predicts the velocity of flow matching."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.level = nn.Linear(1, WIDTH)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, noisy: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Velocity [batch, TOKENS, WIDTH] at noise levels [batch]."""
        return self.out(self.blocks(noisy + self.level(sigma[:, None])[:, None]))


def make_model(settings: JobSettings) -> tuple[Denoiser, torch.optim.Optimizer]:
    """The model, the same on every rank, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Denoiser()
    return model, torch.optim.AdamW(model.parameters(), lr=settings.lr)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], step: int, settings: JobSettings) -> torch.Tensor:
    """The flow-matching loss of a batch in step `step`, which counts from 1."""
    clean = batch["clean"]
    noise, sigma = torch.randn_like(clean), torch.rand(len(clean))
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    loss = (model(noisy, sigma) - (noise - clean)).square().mean()
    broken = step == settings.nan_step and int(os.environ.get("RANK", "0")) == 0
    return loss * math.nan if broken else loss


class Log:
    """What one rank trained on, a line a step, and the weights that it ended with."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._start = f"{time.time():.3f}-{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int, loss: torch.Tensor, ids: torch.Tensor) -> None:
        """Note a step that is done, and let it last as long as a step should."""
        line = {"start": self._start, "step": step, "loss": float(loss.detach()), "ids": sorted(ids.tolist())}
        with (self._folder / f"trained-{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(STEP_SECONDS)

    def end(self, model: nn.Module) -> None:
        """Note the weights: their digest, and whether they are finite."""
        digest, finite = hashlib.sha256(), True
        for _, parameter in sorted(model.named_parameters()):
            digest.update(parameter.detach().float().contiguous().numpy().tobytes())
            finite = finite and bool(parameter.isfinite().all())
        found: dict[str, Any] = {"digest": digest.hexdigest(), "finite": finite}
        (self._folder / f"ended-{self._rank}.json").write_text(json.dumps(found), encoding="utf-8")
