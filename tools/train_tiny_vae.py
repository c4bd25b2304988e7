"""Train the tiny model's VAE on crops of the training photographs.

    python tools/train_tiny_vae.py --wallpapers FOLDER --out RUN --minutes 60

The 2-D twin of `AutoencoderKLQwenImage` is trained (see `image_vae.py`) with L1 + MSE + a small KL term, Muon for the
kernels and AdamW for the rest, a cosine learning rate over the given minutes and an average of the weights. Every few
minutes the averaged weights, the held-out PSNR and the latents' statistics are written to RUN, so it can be
stopped at any time and gone on with (`--start RUN`); `publish_tiny_vae.py` turns RUN into the shipped files.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from crops import DETAIL, Crops, held_out
from image_vae import ImageVAE
from muon import Muon
from photos import PHOTOS, load_photo
from safetensors.torch import load_file, save_file
from torch import Tensor

FONT = Path(__file__).parent.parent / "qwen_edit_zero/assets/fonts/WenQuanYiMicroHei-subset.ttf"
CONFIG = {"base_dim": 16, "z_dim": 16, "dim_mult": [1, 3, 4, 4], "num_res_blocks": 1}


@torch.no_grad()
def mean_psnr(model: ImageVAE, pictures: Tensor) -> float:
    """Mean over pictures of 10 log10(1 / MSE), pixels in [0, 1], latents at the posterior's mode."""
    out = torch.cat([model.decode(model.encode(chunk)[0]).clamp(-1, 1) for chunk in pictures.split(8)])
    mse = ((out - pictures) / 2).square().mean(dim=(1, 2, 3))
    return float((-10 * mse.log10()).mean())


@torch.no_grad()
def latent_statistics(model: ImageVAE, crops: Crops, batches: int = 24) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over random crops."""
    means = torch.cat([model.encode(crops.batch(8, DETAIL))[0] for _ in range(batches)])
    flat = means.transpose(0, 1).flatten(1)
    return flat.mean(1).tolist(), flat.std(1).tolist()


def new_model(start: Path | None) -> ImageVAE:
    """The network with the weights of an earlier run, or with little posterior noise, which drowns the first signal."""
    model = ImageVAE(**CONFIG).to(memory_format=torch.channels_last)  # type: ignore[arg-type]
    if start is not None:
        model.load_state_dict(load_file(start / "average.safetensors"))
        return model
    z_dim = model.post_quant_conv.in_channels
    with torch.no_grad():
        model.quant_conv.weight[z_dim:] *= 0.1
        assert model.quant_conv.bias is not None
        model.quant_conv.bias[z_dim:] = -6.0
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wallpapers", type=Path, required=True, help="unpacked Debian package, see photos.py")
    parser.add_argument("--font", type=Path, default=FONT)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="folder of a run to go on from")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="AdamW's, for gains, biases and the outermost kernels")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--kl", type=float, default=2e-5)
    parser.add_argument(
        "--large", type=float, default=0.7, help="share of the time after which crops are 128 pixels wide"
    )
    parser.add_argument("--save-every", type=float, default=4, help="minutes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    crops = Crops([load_photo(p, args.wallpapers) for p in PHOTOS if p.split == "train"], args.font, args.seed)
    validation = held_out(args.wallpapers)
    model, average = new_model(args.start), new_model(args.start)
    average.load_state_dict(model.state_dict())
    kernels = [
        p for n, p in model.named_parameters() if p.ndim == 4 and "conv_in" not in n and n != "decoder.conv_out.weight"
    ]
    inner = {id(p) for p in kernels}
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if id(p) not in inner], betas=(0.9, 0.99), weight_decay=1e-4
    )
    muon = Muon(kernels, args.muon_lr)

    begin = saved = time.monotonic()
    step, rate = 0, 0.0
    facts: dict[str, float] = {}
    while (done := (time.monotonic() - begin) / (60 * args.minutes)) < 1:
        rate = min(1.0, (step + 1) / 300) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        adamw.param_groups[0]["lr"], muon.param_groups[0]["lr"] = args.lr * rate, args.muon_lr * rate
        # Small crops first: more of them per second; at the end the size at which the VAE is used.
        x = crops.batch(8, 64) if done < args.large else crops.batch(3, DETAIL)
        mean, logvar = model.encode(x)
        error = model.decode(mean + torch.randn_like(mean) * (0.5 * logvar).exp()) - x
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss = error.abs().mean() + error.square().mean() + args.kl * kl
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        muon.step()
        step += 1
        decay = min(0.999, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        facts = {"step": step, "minutes": (time.monotonic() - begin) / 60, "loss": loss.item(), "kl": kl.item()}
        if step % 100 == 0 and time.monotonic() - saved > 60 * args.save_every:
            saved = time.monotonic()
            save(args.out, average, crops, validation, facts)
    save(args.out, average, crops, validation, facts)


def save(out: Path, model: ImageVAE, crops: Crops, validation: Tensor, facts: dict[str, float]) -> None:
    """Write the averaged weights and what is known about them."""
    psnr = mean_psnr(model, validation)
    means, stds = latent_statistics(model, crops)
    content = {"config": CONFIG, **facts, "held_out_psnr": psnr, "latents_mean": means, "latents_std": stds}
    part = out / "average.safetensors.part"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, part)
    part.rename(out / "average.safetensors")
    (out / "facts.json").write_text(json.dumps(content, indent=1))
    print(
        f"{facts['step']:.0f} steps, {facts['minutes']:.1f} min, loss {facts['loss']:.4f}, PSNR {psnr:.2f} dB",
        flush=True,
    )


if __name__ == "__main__":
    main()
