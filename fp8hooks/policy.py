"""Which codec a saved tensor gets, by role and operation. Each line stands beside its reason."""

from __future__ import annotations

import fnmatch

import torch

from fp8hooks import codecs, roles
from fp8hooks.config import CompressConfig, Rule
from fp8hooks.saved import Site

# Operations whose backward breaks on an approximation, whatever its size: found by the sweep over torch's own operator
# database (tests/test_opinfo.py).
_EXACT_OPS = (
    # compares saved tensors with each other or with a bound: near equals would change places
    "maximum", "minimum", "fmax", "fmin", "clamp", "clip", "clamp_min", "clamp_max",
    # compares a saved tensor for equality: no element would match
    "amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "*norm_inf", "norm", "*vector_norm", "*matrix_norm",
    "index_reduce*", "scatter_reduce*", "segment_reduce", "cdist", "pdist", "dist", "renorm", "prod", "cumprod",
    # exponentiates a difference of saved tensors
    "logsumexp", "logcumsumexp", "logaddexp*", "ctc_loss", "log_ndtr", "special_log_ndtr",
    # factorizes, solves or inverts
    "linalg_*", "cholesky*", "lu*", "qr", "svd*", "eig*", "pinverse", "lstsq", "householder_product", "ormqr", "geqrf",
    "triangular_solve", "inverse", "inv", "det", "logdet", "slogdet", "matrix_exp", "pca_lowrank", "svd_lowrank",
    # centres or normalizes by a statistic of the same tensor
    "cov", "corrcoef", "var*", "std*",
)  # fmt: skip

_CUSTOM = Rule("exact", op="Function.*")

#: The default policy; `format` stands for `CompressConfig.format`. First match wins.
DEFAULT: tuple[Rule, ...] = (
    # Held by the module whether autograd saves them or not.
    Rule("exact", role="weight"),
    # logsumexp, mean, rstd: small, and everything is multiplied or exponentiated by them. With them in E4M3 the
    # gradient was off by 0.32 in the median parameter, exact by 0.09 (byte LM).
    Rule("exact", role="statistic"),
    # Lossless, an eighth of the bytes.
    Rule("bits", role="mask"),
    # Lossless; max-pooling's int64 indices are twice the bytes of what they index.
    Rule("narrow", role="index"),
    # Not ours to judge: a custom autograd.Function or operator may do anything with what it saves. (Not those of
    # `fp8hooks.roles.KNOWN_FUNCTIONS`, of which it is known.)
    _CUSTOM,
    Rule("exact", op="ops.*"),
    Rule("exact", op="unknown"),
    # Python 3.10 does not say which operation inside it saves; later versions do, and never give this name.
    Rule("exact", op="multi_head_attention_forward"),
    *(Rule("exact", op=op) for op in _EXACT_OPS),
    # Dropout's noise on a CPU is a float tensor of two values; FP8 would bias the whole gradient (1.4286 to 1.375).
    # It is a mask times a value, and stored as that.
    Rule("bits", op="*dropout*"),
    # Attention's backward rebuilds softmax(q k) from q, k and logsumexp, and so amplifies their error: with INT8 q and
    # k alone put the gradient 0.024 off (byte LM; blocks of 32: 0.020, after a Hadamard rotation of each head: 0.023),
    # with two bits more 0.006, less than bfloat16's own 0.009. Eight bits can't do it: of normal values they leave
    # 0.4 % at the very best, INT8 0.6 %.
    Rule("int10", role="attention_qk"),
    # Values and outputs are not exponentiated: 0.010 off with INT8, 0.011 with squares, 0.022 with E3M4, 0.040 with
    # E4M3 (byte LM).
    Rule("int8", role="attention_vo"),
    # A common offset eats FP8's mantissa: layer_norm of 0.03 n + 100 had a gradient 10,000 times too large with E4M3.
    # INT8 takes the offset off first. (rms_norm takes no mean away, and so has nothing that cancels.)
    *(Rule("int8", op=op) for op in ("layer_norm", "batch_norm", "group_norm", "instance_norm")),
    *(Rule("int8", op=f"Function.*{kind}Norm*") for kind in ("Layer", "Batch", "Group")),
    Rule("int8", op="te.*.layer_norm"),
    # Either that or a product's input, which INT8 is too coarse for (see the end): two bits more serve both.
    Rule("int10", op="te.*.layer_norm_or_linear"),
    # Backward takes 1 - y**2 or y (1 - y) of the result, which near 1 is all rounding: E4M3 makes 0.97 a 1. A saturated
    # RNN's gradient was 0.36 off with INT8, 0.07 with two bits more.
    *(Rule("int10", op=op) for op in ("tanh", "sigmoid", "lstm", "gru", "rnn_tanh")),
    # Backward takes exp(log p) minus 1 or 0. In a young model all log p are near -5, where E4M3's 2.6 % made the
    # gradient 0.074 off (byte LM, step 20; cubes and exact 0.017); in one that is sure of its classes the gradient is
    # about log p itself, and INT8's uniform step made it 0.81 off (digits, loss 3e-4; E4M3 0.15, cubes 0.06, exact
    # 0.03).
    Rule("cubic8", role="log_prob"),
    # Softmax's backward subtracts a mean weighted by the probabilities, which so must still sum to one. In an encoder's
    # attention the worst parameter was 0.16 off with INT8, 0.030 with E4M3, 0.023 with cubes and with exact.
    Rule("cubic8", role="probability"),
    # All else, inputs of linear and convolution above all, gets the config's format. On four trained models (LM,
    # encoder, conv net, mixture of experts) its share of the gradient's error was 0.022, 0.023, 0.032, 0.025 with E4M3;
    # 0.011, 0.012, 0.016, 0.013 with E3M4; 0.012, 0.024, 0.007, 0.010 with INT8; 0.005, 0.006, 0.008, 0.007 with
    # squares; the worst input channel was 0.055, 0.187, 2.28, 0.062 off (LM). 2,000 steps of AdamW ended 0.0012 from
    # exact with squares, 0.0049 with E3M4, where seeds are 0.016 apart.
)

# Backward asks of these tensors whether they are positive, and nothing else.
_SIGNS_SUFFICE = frozenset({"relu", "leaky_relu"})

# Where 4 bits may serve, if memory is short. With all of one operation's saves in 4 bits and the rest by the policy the
# gradient of the trained language model was 0.027 off with silu's (0.014 without; encoder, gelu: 0.014 for 0.008),
# 0.048 with rms_norm's, 0.067 with products'; but 0.20 with the inputs of linear (encoder 0.19; convolution 0.14), 0.22
# with v and outputs of attention, 2.0 with q and k: a sum over tokens, which makes a weight's gradient, does not
# average their noise away.
_BEARS_INT4 = frozenset({"silu", "gelu", "mish", "softplus", "hardswish", "elu", "selu", "celu", "rms_norm", "mul"})

# Roles of which smaller tensors stay exact: the whole gradient hangs on them, and so small they are next to nothing
# beside the activations. Log-probabilities [128, 10] of a conv net that knew its digits by heart put the gradient
# 0.055 off, all the rest 0.008; a language model's are many more. Probabilities that a mixture of experts routes by are
# as few. q and k of width 4 (torch's sample of nn.Transformer) put it 0.17 off.
_LEAST_NUMEL = {"log_prob": 1 << 16, "probability": 1 << 16, "attention_qk": 1 << 12}


# Where the first is asked for the second serves: the same format with two bits more.
_FINER = ("int8", "int10")


class Policy:
    """The rules of one config, with the answers already given kept by site."""

    def __init__(self, config: CompressConfig) -> None:
        self._user_rules = config.rules
        self._format = config.format
        # By site and dtype: the codec, and whether a rule chose it (else it is the config's format).
        self._answers: dict[tuple[Site, torch.dtype], tuple[str, bool]] = {}
        self._used: set[Rule] = set()

    def codec(self, site: Site, dtype: torch.dtype) -> str:
        """The name of the codec for a tensor of `dtype` saved at `site`."""
        return self._answer(site, dtype)[0]

    def least_numel(self, site: Site, dtype: torch.dtype) -> int:
        """Tensors saved at `site` with fewer elements stay exact, unless a rule of the user's speaks of them."""
        return 0 if self._user_rule(site, dtype) is not None else _LEAST_NUMEL.get(site.role, 0)

    def signs_suffice(self, site: Site, dtype: torch.dtype) -> bool:
        """Whether backward needs no more than signs of a tensor saved at `site`, and no rule of the user's speaks."""
        chosen = site.op in _SIGNS_SUFFICE and site.role == "activation" and dtype in codecs.FLOATS
        return chosen and self._format != codecs.EXACT and self._user_rule(site, dtype) is None

    def bears_int4(self, site: Site, dtype: torch.dtype) -> bool:
        """Whether a plan may store in 4 bits what is saved at `site`."""
        codec, by_rule = self._answer(site, dtype)
        chosen = site.op in _BEARS_INT4 and site.role == "activation"
        return chosen and not by_rule and codec != codecs.EXACT and codecs.holds("int4", dtype)

    def _user_rule(self, site: Site, dtype: torch.dtype) -> Rule | None:
        return next((rule for rule in self._user_rules if matches(rule, site, dtype)), None)

    def _answer(self, site: Site, dtype: torch.dtype) -> tuple[str, bool]:
        key = (site, dtype)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._decide(site, dtype)
        return answer

    def _decide(self, site: Site, dtype: torch.dtype) -> tuple[str, bool]:
        if site.role == "weight":
            return codecs.EXACT, True
        for rule in (*self._user_rules, *DEFAULT):
            if rule is _CUSTOM and site.op in roles.KNOWN_FUNCTIONS:
                continue
            if matches(rule, site, dtype):
                self._used.add(rule)
                return rule.codec, True
        return (self._format if codecs.holds(self._format, dtype) else codecs.EXACT), False

    def unused(self) -> list[Rule]:
        """The user's rules that no saved tensor has matched so far."""
        return [rule for rule in self._user_rules if rule not in self._used]

    def accepts(self, site: Site, dtype: torch.dtype, stored: str) -> bool:
        """Whether a payload that another site had stored as `stored` serves at this one too.

        Activations that get `CompressConfig.format` for want of a reason against it do with any 8-bit format: sharing
        saves a whole payload, the choice between formats a little error. A rule, though, has its reason.
        """
        codec, by_rule = self._answer(site, dtype)
        if stored == "int4" and codec != stored:
            return self.bears_int4(site, dtype)
        return stored == codec or not by_rule or (codec, stored) == _FINER


def matches(rule: Rule, site: Site, dtype: torch.dtype) -> bool:
    """Whether a rule speaks of a tensor of `dtype` saved at `site`."""
    return (
        (rule.dtype is None or rule.dtype == dtype)
        and codecs.holds(rule.codec, dtype)
        and _glob(rule.role, site.role)
        and _glob(rule.op, site.op)
        and _glob(rule.module, site.module)
    )


def _glob(pattern: str | None, name: str) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)
