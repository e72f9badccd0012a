"""The encoder once more, written from the formulas in float64, one clip, one head and one frame range at a time.

Slow on purpose: no fused projection, no batch, no padding, no ``scaled_dot_product_attention``. It reads the weights
of an :class:`Encoder` from its state dict and shares no code with it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Sublayer = Callable[[Tensor], Tensor]


class NaiveEncoder:
    """Float64 reference of ``encoder`` (no dropout)."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        self.config = encoder.config
        self.w: Weights = {k: v.detach().double() for k, v in encoder.state_dict().items()}

    def __call__(self, codes_KT: Tensor, mask_T: Tensor) -> Tensor:
        """Hidden states ``[T, D]`` of one clip without padding."""
        c, w = self.config, self.w
        x = torch.stack([self.frame(codes_KT[:, t].tolist(), bool(mask_T[t])) for t in range(codes_KT.shape[1])])
        if c.position == "conv":
            x = x + gelu(self.conv(x))
        if "input_norm.weight" in w:
            x = self.norm(x, "input_norm")
        if c.scheme == "residual_dual":
            return self.residual_dual(x)
        for i in range(c.num_layers):
            x = self.block(x, i)
        return self.norm(x, "final_norm") if "final_norm.weight" in w else x

    def frame(self, codes: list[int], masked: bool) -> Tensor:
        if masked:
            return self.w["embedding.mask_vector"]
        rows = [self.w["embedding.table"][k * self.config.codebook_size + code] for k, code in enumerate(codes)]
        return sum(rows[1:], start=rows[0])

    def conv(self, x_TD: Tensor) -> Tensor:
        c, w = self.config, self.w
        direction, gain = w["position.direction"], w["position.gain"]
        weight = torch.stack(
            [gain[0, 0, j] * direction[:, :, j] / direction[:, :, j].norm() for j in range(c.conv_kernel)], dim=2
        )
        frames, dim = x_TD.shape
        width = dim // c.conv_groups
        out = w["position.bias"].repeat(frames, 1)
        for t in range(frames):
            for j in range(c.conv_kernel):
                source = t + j - c.conv_kernel // 2
                if 0 <= source < frames:
                    for g in range(c.conv_groups):
                        rows = slice(g * width, (g + 1) * width)
                        out[t, rows] += weight[rows, :, j] @ x_TD[source, rows]
        return out

    def norm(self, x: Tensor, name: str) -> Tensor:
        c, w = self.config, self.w
        if c.norm == "dyt":
            return w[f"{name}.weight"] * torch.tanh(w[f"{name}.alpha"] * x) + w[f"{name}.bias"]
        if c.norm == "rmsnorm":
            return w[f"{name}.weight"] * x / ((x**2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return w[f"{name}.weight"] * (x - mean) / (variance + c.norm_eps).sqrt() + w[f"{name}.bias"]

    def linear(self, x: Tensor, name: str, part: int = 0, parts: int = 1) -> Tensor:
        """Rows ``part`` of ``parts`` of a stacked Linear."""
        weight, bias = self.w[f"{name}.weight"].chunk(parts)[part], self.w[f"{name}.bias"].chunk(parts)[part]
        if f"{name}.gain_P" in self.w:
            u, v = self.w[f"{name}.u_PO"][part], self.w[f"{name}.v_PI"][part]
            weight = self.w[f"{name}.gain_P"][part] * weight / (u @ weight @ v)
        return x @ weight.T + bias

    def attention(self, x: Tensor, i: int) -> Tensor:
        c, name = self.config, f"blocks.{i}.attention"
        q, k, v = (self.linear(x, f"{name}.qkv", part, 3) for part in range(3))
        width, heads = c.dim // c.num_heads, []
        for h in range(c.num_heads):
            columns = slice(h * width, (h + 1) * width)
            q_h, k_h, v_h = q[:, columns], k[:, columns], v[:, columns]
            if c.qk_norm or c.scheme in ("hybrid", "hybrid_star"):
                q_h, k_h = self.norm(q_h, f"{name}.q_norm"), self.norm(k_h, f"{name}.k_norm")
            if c.scheme in ("hybrid", "hybrid_star"):
                v_h = self.norm(v_h, f"{name}.v_norm")
            if c.position == "rope":
                q_h, k_h = self.rotate(q_h), self.rotate(k_h)
            logits = q_h @ k_h.T / math.sqrt(width)
            if c.soft_cap is not None:
                logits = c.soft_cap * torch.tanh(logits / c.soft_cap)
            weight = torch.exp(logits - logits.max(-1, keepdim=True).values)
            out = weight / weight.sum(-1, keepdim=True) @ v_h
            if c.gate != "none":
                gate = 1 / (1 + torch.exp(-self.linear(x, f"{name}.gate")))
                out = out * (gate[:, h : h + 1] if c.gate == "headwise" else gate[:, columns])
            heads.append(out)
        mixed = torch.cat(heads, dim=1)
        if c.scheme == "sub_ln":
            mixed = self.norm(mixed, f"{name}.inner_norm")
        return self.linear(mixed, f"{name}.out")

    def rotate(self, x_TE: Tensor) -> Tensor:
        out, half = x_TE.clone(), x_TE.shape[1] // 2
        for t in range(x_TE.shape[0]):
            for i in range(half):
                angle = t * self.config.rope_theta ** (-2 * i / (2 * half))
                first, second = x_TE[t, i], x_TE[t, i + half]
                out[t, i] = first * math.cos(angle) - second * math.sin(angle)
                out[t, i + half] = second * math.cos(angle) + first * math.sin(angle)
        return out

    def ffn(self, x: Tensor, i: int) -> Tensor:
        hidden = gelu(self.linear(x, f"blocks.{i}.ffn.fc1"))
        if self.config.scheme == "sub_ln":
            hidden = self.norm(hidden, f"blocks.{i}.ffn.inner_norm")
        return self.linear(hidden, f"blocks.{i}.ffn.fc2")

    def block(self, x: Tensor, i: int) -> Tensor:
        c, num_layers = self.config, self.config.num_layers

        def attention(y: Tensor) -> Tensor:
            return self.attention(y, i)

        def ffn(y: Tensor) -> Tensor:
            return self.ffn(y, i)

        def ln(y: Tensor, which: str) -> Tensor:
            return self.norm(y, f"blocks.{i}.{which}")

        match c.scheme:
            case "pre" | "sub_ln":
                return self.two(x, lambda y, f, n: y + f(ln(y, n)), attention, ffn)
            case "post":
                return self.two(x, lambda y, f, n: ln(y + f(y), n), attention, ffn)
            case "deepnorm":
                alpha = (2 * num_layers) ** 0.25
                return self.two(x, lambda y, f, n: ln(alpha * y + f(y), n), attention, ffn)
            case "peri" | "sandwich":
                return self.two(x, lambda y, f, n: y + ln(f(ln(y, n)), out(n)), attention, ffn)
            case "olmo2":
                return self.two(x, lambda y, f, n: y + ln(f(y), n), attention, ffn)
            case "ln_scaling":
                return self.two(x, lambda y, f, n: y + f(ln(y, n) / math.sqrt(i + 1)), attention, ffn)
            case "layerscale":
                scale = {"attention_norm": "attention_scale", "ffn_norm": "ffn_scale"}
                return self.two(x, lambda y, f, n: y + self.w[f"blocks.{i}.{scale[n]}"] * f(ln(y, n)), attention, ffn)
            case "keel":
                return self.two(x, lambda y, f, n: ln(2 * num_layers * y + f(ln(y, n)), out(n)), attention, ffn)
            case "mix_ln":
                if i < math.floor(c.mix_ln_post * num_layers):
                    return self.two(x, lambda y, f, n: ln(y + f(y), n), attention, ffn)
                return self.two(x, lambda y, f, n: y + f(ln(y, n)), attention, ffn)
            case "hybrid_star" if i == 0:
                return self.two(x, lambda y, f, n: y + f(ln(y, n)), attention, ffn)
            case "hybrid" | "hybrid_star":
                z = ln(x + attention(x), "ffn_norm")
                return z + ffn(z)
        raise AssertionError(c.scheme)

    def two(self, x: Tensor, rule: Callable[[Tensor, Sublayer, str], Tensor], a: Sublayer, f: Sublayer) -> Tensor:
        return rule(rule(x, a, "attention_norm"), f, "ffn_norm")

    def residual_dual(self, x: Tensor) -> Tensor:
        r = x
        for i in range(self.config.num_layers):
            for sublayer, name in ((self.attention, "attention_norm"), (self.ffn, "ffn_norm")):
                g = sublayer(x, i)
                x, r = self.norm(x + g, f"blocks.{i}.{name}"), r + g
        return x + self.norm(r, "final_norm")


def out(norm_name: str) -> str:
    """Name of the norm on the sublayer's output."""
    return norm_name.replace("_norm", "_out_norm")


def gelu(x: Tensor) -> Tensor:
    """Exact GELU."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
