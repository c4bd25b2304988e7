"""Memory and arithmetic beside training: filling the cache with the text encoder and the VAE, and sample pictures.

Before the transformer is built every rank encodes its share of the samples, one at a time: first all prompts with
the text encoder, then all latents with the VAE; each is loaded for its kind of entry alone and released afterwards.
While training nothing but the transformer is loaded. Sample pictures are denoised with the transformer as it is
sharded, one picture a data rank; then the VAE is loaded, in fp32, for decoding, and released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.planning.autograd.computing import computing
from qwen_edit_zero.planning.autograd.trace import forward_only
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.known import model_folder, read_config, takes_several_references
from qwen_edit_zero.planning.jobs.model import PATCH, VAE_FACTOR
from qwen_edit_zero.planning.jobs.tokens import VISION_SIDE, calculate_dimensions
from qwen_edit_zero.planning.passes.activations import adapted_of
from qwen_edit_zero.planning.passes.text_encoder import RELEASED_TEXT_ENCODER, TextEncoderShape
from qwen_edit_zero.planning.passes.vae import RELEASED_VAE, VaeShape, decoding_of_picture, encoding_of_picture

TEMPLATE_TOKENS = 64  # in front of every prompt; the embedding is without them
_PIXELS = PATCH * VAE_FACTOR  # of a token, each way


@dataclass(frozen=True)
class Encoding:
    """Filling the cache with samples like the job's, on one rank; bytes on the device.

    Attributes:
        text_encoder, text_encoder_peak: its weights, and the most that is there beside them for one prompt.
        vae, vae_peak: the same of the VAE for one picture. Workspace of convolution kernels is not in here.
        flops: of one sample: its prompt, its target and its references.
    """

    text_encoder: int
    text_encoder_peak: int
    vae: int
    vae_peak: int
    flops: int

    @property
    def weights(self) -> int:
        """Of whichever of the two takes more memory: they are never there together."""
        return self.text_encoder if self._text_is_larger else self.vae

    @property
    def activations(self) -> int:
        """Beside `weights`."""
        return self.text_encoder_peak if self._text_is_larger else self.vae_peak

    @property
    def peak(self) -> int:
        """The most that a rank holds while the cache is filled."""
        return self.weights + self.activations

    @property
    def _text_is_larger(self) -> bool:
        return self.text_encoder + self.text_encoder_peak >= self.vae + self.vae_peak


@dataclass(frozen=True)
class Sampling:
    """One sample picture on one rank, beside what training holds; bytes on the device.

    Attributes:
        forward_peak: of a forward pass of the transformer without gradients.
        vae, decode_peak: weights of the VAE in fp32, and the most that is there beside them; after the forward passes.
        flops: of all forward passes of a picture, guidance included, and of decoding it.
    """

    forward_peak: int
    vae: int
    decode_peak: int
    flops: int

    @property
    def peak(self) -> int:
        """The most of the two parts."""
        return max(self.forward_peak, self.vae + self.decode_peak)


def encoding(job: Job, *, on_gpu: bool = True) -> Encoding:
    """Of samples like the job's. On GPUs the encoders compute in bf16 unless `precision.mode` is fp32."""
    low = on_gpu and job.settings.precision.mode != "fp32"
    dtype, element = ("bf16", 2) if low else ("fp32", 4)
    text, vae = _text_encoder(job), _vae(job)
    pictures = [_vision_grid(job, grid) for grid in job.sample.references]
    prompt = text.prompt(job.sample.text_tokens + TEMPLATE_TOKENS, pictures, element)
    halves = [
        encoding_of_picture(vae, columns * _PIXELS, rows * _PIXELS, dtype)
        for rows, columns in (job.sample.target, *job.sample.references)
    ]
    return Encoding(
        text_encoder=text.elements * element,
        text_encoder_peak=prompt.peak,
        vae=_vae_elements(vae) * element,
        vae_peak=max(half.peak for half in halves),
        flops=prompt.flops + sum(half.flops for half in halves),
    )


def encoding_flops(job: Job) -> int:
    """Of encoding one sample of the job."""
    return encoding(job).flops


def sampling(job: Job, *, on_gpu: bool = True) -> Sampling:
    """Of a picture of the size of the job's target; the VAE decodes in fp32."""
    rows, columns = job.sample.target
    vae, settings = _vae(job), job.settings.sampling
    decode = decoding_of_picture(vae, columns * _PIXELS, rows * _PIXELS, "fp32")
    trained = frozenset(p.name for p in job.trained)
    how = computing(job, on_gpu=on_gpu)
    peak, flops = forward_only(job.model, job.sample, how, trained=trained, adapted=adapted_of(job))
    forwards = settings.steps * (2 if settings.guidance > 1 else 1)
    return Sampling(peak, 4 * _vae_elements(vae), decode.peak, forwards * flops * job.sequence + decode.flops)


def _vae_elements(shape: VaeShape) -> int:
    """Whatever the size of the picture."""
    halves = (of(shape, 32, 32, "fp32") for of in (encoding_of_picture, decoding_of_picture))
    return sum(half.elements for half in halves)


def _vision_grid(job: Job, grid: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of vision tokens of a reference, resized for the text encoder."""
    data = job.settings.data
    try:
        area = data.condition_area if takes_several_references(job.settings.model.path) else data.vae_area
    except ModelFolderError:  # the transformer's configuration was given without a folder
        area = data.condition_area
    width, height = calculate_dimensions(area, grid[1] / grid[0])
    return max(1, round(height / VISION_SIDE)), max(1, round(width / VISION_SIDE))


def _config(job: Job, component: str, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
    folder = model_folder(job.settings.model.path)
    file = None if folder is None else folder / component / "config.json"
    return read_config(file) if file is not None and file.is_file() else otherwise


def _text_encoder(job: Job) -> TextEncoderShape:
    return TextEncoderShape.from_config(_config(job, "text_encoder", RELEASED_TEXT_ENCODER))


def _vae(job: Job) -> VaeShape:
    return VaeShape.from_config(_config(job, "vae", RELEASED_VAE))
