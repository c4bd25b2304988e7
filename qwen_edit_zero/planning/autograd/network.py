"""diffusers' `QwenImageTransformer2DModel` and the training loss, in the operations of `operations.py`.

Variables are kept as long as there: what a function holds until it returns, it holds here too.
"""

from __future__ import annotations

from qwen_edit_zero.planning.autograd import operations as op
from qwen_edit_zero.planning.autograd.attention_cost import attention
from qwen_edit_zero.planning.autograd.computing import Computing
from qwen_edit_zero.planning.autograd.norms import layer_norm, rms_norm
from qwen_edit_zero.planning.autograd.tape import Shape, Tape, Value
from qwen_edit_zero.planning.jobs.model import MLP_RATIO, TIME_CHANNELS, TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape

Positions = tuple[Value, Value]  # of pictures and text, (tokens, 1, half a head) complex


class Network:
    """The transformer over a micro-batch.

    Args:
        trained: names of the parameters that train, adapters among them.
        adapted: (rank, names of modules with an adapter); None without adapters.
        masked: prompts of the micro-batch differ in length, so there is a mask.
    """

    def __init__(
        self,
        tape: Tape,
        model: TransformerShape,
        sample: SampleShape,
        computing: Computing,
        *,
        trained: frozenset[str],
        adapted: tuple[int, frozenset[str]] | None,
        batch: int,
        masked: bool,
    ) -> None:
        self.tape, self.model, self.sample, self.how = tape, model, sample, computing
        self.batch, self.masked, self._trained, self._adapted = batch, masked, trained, adapted
        ranks = computing.sequence
        # The first rank's shares, which are the largest. With one rank all tokens.
        self.image, self.text = -(-sample.image_tokens // ranks), -(-sample.text_tokens // ranks)

    # Parameters ----------------------------------------------------------------------------------------------------

    def _parameter(self, name: str, shape: Shape) -> Value:
        trains = name in self._trained
        return self.tape.given(shape, self.how.weight_dtype(trains), needs_grad=trains)

    def _weight_and_bias(self, name: str, outputs: int, inputs: int) -> tuple[Value, Value]:
        return self._parameter(f"{name}.weight", (outputs, inputs)), self._parameter(f"{name}.bias", (outputs,))

    def _linear(self, name: str, value: Value, outputs: int) -> Value:
        """A linear layer, with its adapter if it has one, as peft computes it."""
        tape, inputs, always = self.tape, value.shape[-1], self.how.linears_remember
        if self._adapted is None or name not in self._adapted[1]:
            weight, bias = (
                self._parameter(f"{name}.weight", (outputs, inputs)),
                self._parameter(f"{name}.bias", (outputs,)),
            )
            return op.linear(tape, value, weight, bias, name, remembers_always=always)
        rank, base = self._adapted[0], f"{name}.base_layer"
        result = op.linear(tape, value, *self._weight_and_bias(base, outputs, inputs), base, remembers_always=always)
        dtype = result.dtype
        first, second = f"{name}.lora_A.default", f"{name}.lora_B.default"
        down, up = (
            self._parameter(f"{first}.weight", (rank, inputs)),
            self._parameter(f"{second}.weight", (outputs, rank)),
        )
        value = op.to(tape, value, down.dtype)
        inner = op.linear(tape, value, down, None, first, remembers_always=always)
        change = op.times(tape, op.linear(tape, inner, up, None, second, remembers_always=always))
        result = op.add(tape, result, change)
        return op.to(tape, result, dtype)

    # Outside of the blocks -----------------------------------------------------------------------------------------

    def embed(self) -> tuple[Value, Value, Value, Value | None, Positions]:
        """(image stream, text stream, embedding of the time, mask, rotary positions) as the blocks take them."""
        tape, model, batch, width = self.tape, self.model, self.batch, self.model.width
        given = "fp32" if self.how.autocast_dtype else self.how.dtype
        image, text = self.sample.image_tokens, self.sample.text_tokens
        tokens = self._input((batch, image, model.in_channels), given)
        prompt = self._input((batch, text, model.text_width), given)
        mask = tape.given((batch, text), "bool") if self.masked else None
        hidden = self._linear("img_in", tokens, width)
        prompt = rms_norm(tape, prompt, self._parameter("txt_norm.weight", (model.text_width,)))
        prompt = self._linear("txt_in", prompt, width)
        times = batch * (2 if model.zero_cond_t else 1)
        time = Value((times, TIME_CHANNELS), hidden.dtype, tape.new((times, TIME_CHANNELS), hidden.dtype))
        name = "time_text_embed.timestep_embedder"
        time = op.activation(tape, self._linear(f"{name}.linear_1", time, width), "silu")
        time = self._linear(f"{name}.linear_2", time, width)
        if model.time_condition:
            table = self._parameter("time_text_embed.addition_t_embedding.weight", (2, width))
            time = op.add(tape, time, op.to(tape, op.times(tape, table), time.dtype))
        # Rotations of the text are part of a table; those of pictures are put together for each forward pass.
        pairs = model.head_dim // 2
        pictures = Value((image, 1, pairs), "complex64", tape.new((image, 1, pairs), "complex64"))
        positions = (
            Value((self.image, 1, pairs), "complex64", pictures.storage),
            tape.given((self.text, 1, pairs), "complex64"),
        )
        if self.how.sequence > 1:
            hidden, prompt = op.rows(tape, hidden, self.image), op.rows(tape, prompt, self.text)
        return hidden, prompt, time, mask, positions

    def _input(self, shape: Shape, dtype: str) -> Value:
        """Part of the batch, or the copy of it in the compute dtype that engines other than DDP make."""
        if dtype == "fp32":
            return self.tape.given(shape, dtype)
        return Value(shape, dtype, self.tape.new(shape, dtype))

    def losses(self, hidden: Value, time: Value, held: list[Value]) -> Value:
        """From the image stream behind the blocks to the micro-batch's loss; `held` is given up with the output."""
        tape, model, batch = self.tape, self.model, self.batch
        if model.zero_cond_t:
            time = op.chunk(tape, time, 2, 0)[0]
        emb = op.to(tape, op.activation(tape, time, "silu"), hidden.dtype)
        emb = self._linear("norm_out.linear", emb, 2 * model.width)
        scale, shift = op.chunk(tape, emb, 2, 1)
        del emb
        scale = op.view(tape, op.plus_one(tape, scale), (batch, 1, model.width))
        hidden = op.multiply(tape, layer_norm(tape, hidden), scale, "modulation")
        hidden = op.add(tape, hidden, op.view(tape, shift, (batch, 1, model.width)))
        output = self._linear("proj_out", hidden, model.patch_size**2 * model.out_channels)
        del hidden, scale, shift
        if self.how.sequence > 1:
            own = (batch, self.image, output.shape[-1])
            buffers = [tape.new(own, output.dtype) for _ in range(1 + self.how.sequence)]
            output = op.exchange(tape, output, (batch, self.sample.image_tokens, output.shape[-1]))
            buffers.clear()
        held.clear()
        tape.leave_autocast()
        prediction = op.rows(tape, output, self.sample.target_tokens)
        del output
        error = op.to(tape, prediction, "fp32")
        del prediction
        error = op.plus_one(tape, error)  # minus the velocity
        square = op.mean_square(tape, error)
        if self.how.loss_mask:
            weights = Value(square.shape, "fp32", tape.new(square.shape, "fp32"))
            square = op.multiply(tape, square, weights, "loss")
        losses = op.total(tape, square, (batch,))
        losses = op.multiply(tape, losses, tape.given((batch,), "fp32"), "loss")
        losses = op.multiply(tape, losses, tape.given((batch,), "fp32"), "loss")
        return op.times(tape, op.total(tape, losses))

    # A block -------------------------------------------------------------------------------------------------------

    def modulated_pictures(self) -> Value | None:
        """(B, image tokens): which pictures are modulated at time 0 (2511)."""
        if not self.model.zero_cond_t:
            return None
        whole = self.tape.new((self.batch, self.sample.image_tokens), "int32")
        return Value((self.batch, self.image), "int32", whole)

    def block(
        self,
        number: int,
        hidden: Value,
        text: Value,
        time: Value,
        positions: Positions,
        mask: Value | None,
        index: Value | None,
    ) -> tuple[Value, Value]:
        """(text stream, image stream) behind block `number`."""
        tape, name, width = self.tape, f"transformer_blocks.{number}", self.model.width
        img_mod_params = self._linear(f"{name}.img_mod.1", op.activation(tape, time, "silu"), 6 * width)
        if self.model.zero_cond_t:
            time = op.chunk(tape, time, 2, 0)[0]
        txt_mod_params = self._linear(f"{name}.txt_mod.1", op.activation(tape, time, "silu"), 6 * width)
        img_mod1, img_mod2 = op.chunk(tape, img_mod_params, 2, 1)
        txt_mod1, txt_mod2 = op.chunk(tape, txt_mod_params, 2, 1)
        img_normed = layer_norm(tape, hidden)
        img_modulated, img_gate1 = self._modulate(img_normed, img_mod1, index)
        txt_normed = layer_norm(tape, text)
        txt_modulated, txt_gate1 = self._modulate(txt_normed, txt_mod1, None)
        img_attn, txt_attn = self._attention(f"{name}.attn", img_modulated, txt_modulated, positions, mask)
        hidden = op.add(tape, hidden, op.multiply(tape, img_gate1, img_attn, "gate"))
        text = op.add(tape, text, op.multiply(tape, txt_gate1, txt_attn, "gate"))

        img_normed2 = layer_norm(tape, hidden)
        img_modulated2, img_gate2 = self._modulate(img_normed2, img_mod2, index)
        img_mlp = self._mlp(f"{name}.img_mlp", img_modulated2)
        hidden = op.add(tape, hidden, op.multiply(tape, img_gate2, img_mlp, "gate"))
        txt_normed2 = layer_norm(tape, text)
        txt_modulated2, txt_gate2 = self._modulate(txt_normed2, txt_mod2, None)
        txt_mlp = self._mlp(f"{name}.txt_mlp", txt_modulated2)
        text = op.add(tape, text, op.multiply(tape, txt_gate2, txt_mlp, "gate"))
        if text.dtype == "fp16":
            text = op.activation(tape, text, "clip")
        if hidden.dtype == "fp16":
            hidden = op.activation(tape, hidden, "clip")
        return text, hidden

    def _modulate(self, value: Value, parameters: Value, index: Value | None) -> tuple[Value, Value]:
        tape, batch, width = self.tape, self.batch, self.model.width
        shift, scale, gate = op.chunk(tape, parameters, 3, 1)
        if index is not None:
            shift, scale, gate = (self._by_picture(part, index) for part in (shift, scale, gate))
        else:
            shift, scale, gate = (op.view(tape, part, (batch, 1, width)) for part in (shift, scale, gate))
        return op.add(tape, op.multiply(tape, value, op.plus_one(tape, scale), "modulation"), shift), gate

    def _by_picture(self, parameters: Value, index: Value) -> Value:
        tape, batch, width = self.tape, self.batch, self.model.width
        halves = [op.view(tape, op.rows(tape, parameters, batch, 0), (batch, 1, width)) for _ in range(2)]
        shape = (*index.shape, 1)
        condition = Value(shape, "bool", tape.new(shape, "bool"))
        return op.select(tape, condition, halves[0], halves[1], "modulation")

    def _mlp(self, name: str, value: Value) -> Value:
        value = self._linear(f"{name}.net.0.proj", value, MLP_RATIO * self.model.width)
        value = op.activation(self.tape, value, "gelu")
        return self._linear(f"{name}.net.2", value, self.model.width)

    def _attention(
        self, name: str, image: Value, text: Value, positions: Positions, mask: Value | None
    ) -> tuple[Value, Value]:
        tape, how, tokens, width = self.tape, self.how, text.shape[1], self.model.width
        joint_mask = None if mask is None else tape.new((self.batch, self.sample.tokens), "bool")
        of_image = [self._project(f"{name}.{layer}", image) for layer in ("to_q", "to_k", "to_v")]
        of_text = [self._project(f"{name}.{layer}", text) for layer in ("add_q_proj", "add_k_proj", "add_v_proj")]
        for values, norms, of_stream in (
            (of_image, ("norm_q", "norm_k"), positions[0]),
            (of_text, ("norm_added_q", "norm_added_k"), positions[1]),
        ):
            for i, norm in enumerate(norms):
                weight = self._parameter(f"{name}.{norm}.weight", (self.model.head_dim,))
                dtype = values[i].dtype
                values[i] = rms_norm(tape, values[i], weight)
                if how.norms_return_input_dtype:
                    values[i] = op.to(tape, values[i], dtype)
            for i in range(2):
                values[i] = op.rotate(tape, values[i], of_stream)
                if how.sequence > 1:
                    values[i] = op.to(tape, values[i], values[2].dtype)
        joint = [op.cat(tape, pair, 1) for pair in zip(of_text, of_image, strict=True)]
        if how.sequence > 1:
            del values, of_image, of_text
            attended = self._exchanged(joint, joint_mask is not None)
        else:
            attended = attention(tape, (joint[0], joint[1], joint[2]), mask, math=how.attention == "math")
            attended = op.to(tape, op.view(tape, attended, (*attended.shape[:2], width)), joint[0].dtype)
        del joint_mask
        txt_out, img_out = self._own(attended, tokens), self._own(attended, image.shape[1])
        img_out = self._linear(f"{name}.to_out.0", img_out, width)
        return img_out, self._linear(f"{name}.to_add_out", txt_out, width)

    def _project(self, name: str, value: Value) -> Value:
        shape = (*value.shape[:2], self.model.heads, self.model.head_dim)
        return op.view(self.tape, self._linear(name, value, self.model.width), shape)

    def _own(self, attended: Value, tokens: int) -> Value:
        """A stream's rows, contiguous: those of a single sample are already."""
        part = op.rows(self.tape, attended, tokens)
        return op.copy(self.tape, part) if self.batch > 1 else part

    def _exchanged(self, joint: list[Value], masked: bool) -> Value:
        """Attention of own heads over all tokens, between two exchanges (`edit_model/sequence_parallel.py`), before
        which `joint` is emptied."""
        tape, batch, tokens = self.tape, self.batch, self.sample.tokens
        heads, head = self.model.heads // self.how.sequence, self.model.head_dim
        own = joint[0].shape[1]
        stacked = op.stack(tape, joint, (own * self.how.sequence, 3, batch, heads, head))
        joint.clear()
        received = op.exchange(tape, stacked, (tokens, 3, batch, heads, head))
        del stacked
        parts = op.chunk(tape, received, 3, 1)
        del received
        parts = [op.view(tape, part, (batch, tokens, heads, head)) for part in parts]
        mask = tape.given((batch, tokens), "bool") if masked else None
        attended = attention(tape, (parts[0], parts[1], parts[2]), mask, math=self.how.attention == "math")
        if batch > 1:
            attended = op.copy(tape, attended)
        back = op.exchange(tape, attended, (batch, own, self.model.width))
        return op.copy(tape, back)
