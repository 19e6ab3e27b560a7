"""PackedModel: a loaded model file with an active profile; numpy in, numpy out, no torch. Made by `load`.

    m = anyprec.load("net.apm")
    y = m(x)                            # at m.bits, the widest width in the file until it is set
    m.bits = 2; y = m(x); y = m(x, bits=1)
    y = m(x, bits="random"); m.last_bits  # a width drawn for this call, and which it was
    y = m(x, bits="auto"); m.last_stages  # a cascade: few bits first, more for unsure inputs; who stopped where
    m.predict("photo.jpg")              # labels with probabilities; pictures prepared as in training (predict.py)
    with anyprec.load("net.apm") as m: ...  # memory given back at the end, or by m.close()

Copies share the weights; a pickle holds the path of the file, which is opened again where it is unpickled.

The work is done by the C++ engine (native/include/anyprec/engine.h), without the GIL; calls from many threads are
safe. What is here turns names of profiles into numbers, and mistakes into clear errors; arrays.py turns arrays into
the engine's layout.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import threading
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anyprec import _native
from anyprec.cascade import answering
from anyprec.cascade.cascade import Cascade
from anyprec.errors import CascadeError, InputError, ModelClosed, UnsupportedBits
from anyprec.models.catalog import find
from anyprec.preprocessing import Preprocessing
from anyprec.run.arrays import InputInfo, check_layout, check_threads, in_order, input_arrays, output_array
from anyprec.run.model_source import ModelSource
from anyprec.widths import FLOAT, check_bits, parse_widths

if TYPE_CHECKING:
    from anyprec.run.predict import Answer

json_numbers = _native.json_numbers  # float32 -> the numbers of a JSON array, without the GIL; for the server
CancelToken = _native.CancelToken  # CancelToken() or CancelToken(timeout_s=1.0); `cancel()` from any thread

Bits = int | str  # a width, the name of a profile, "random" or "auto"
RANDOM = "random"  # a width is drawn for every call; "random:2,4,8" draws among those
LARGE_SIDE = 512  # at which an output that is a map has more than one pixel
AUTO = "auto"  # the file's cascade; a profile of that name in an old file takes precedence


def load(
    path: str | Path,
    *,
    max_bits: int | None = None,
    threads: int = 1,
    layout: str = "NCHW",
    memory_budget: int | None = None,
    keep_copy: bool = True,
    verify: bool = True,
    isa: str | None = None,
    check_finite: bool = True,
) -> PackedModel:
    """Open a model file, or a model that comes with anyprec, by its name (`anyprec models` lists them).

    What is read is kept in memory: changing or deleting the file later changes nothing here.

    path: a model file, or a name; a path that exists takes precedence over a name.
    max_bits: reads only the first planes, those of widths up to this one.
    threads: the number of threads that one call may use.
    layout: of the arrays that calls take and give, "NCHW" or "NHWC".
    memory_budget: bounds the bytes of prepared weights kept for widths beyond the one in use.
    keep_copy: False frees the file's bytes once the weights of a width are prepared (Linux). Another width reads them
        again; if the file was cut or rewritten meanwhile, that is refused. Replaced or deleted, it stays readable.
    verify: compares every tensor with its checksum.
    isa: overrides ANYPREC_ISA.
    check_finite: False computes inputs with NaN or infinity, as ARITHMETIC.md says, instead of refusing them.
    """
    max_bits = check_bits(max_bits) if max_bits is not None else 0
    if memory_budget is not None and (not isinstance(memory_budget, int) or memory_budget < 1):
        raise InputError(f"memory_budget={memory_budget!r} is not a number of bytes; give at least 1, or leave it out")
    native, source = ModelSource.load(
        os.fsencode(find(path)), max_bits, verify, memory_budget or 0, isa or "", keep_copy
    )
    return PackedModel(native, source, threads=threads, layout=layout, check_finite=check_finite)


class PackedModel:
    """An open model file: call it with images, at any of its widths. `anyprec.load` makes it.

    Calls are safe from many threads; setting `bits` costs nothing and copies nothing. `close()`, or the end of a `with`
    block, releases its memory.
    """

    def __init__(
        self,
        native: _native.Model,
        source: ModelSource,
        *,
        threads: int = 1,
        layout: str = "NCHW",
        check_finite: bool = True,
    ) -> None:
        self._opened: _native.Model | None = native
        self._source = source
        self.check_finite = check_finite
        self._chosen: str | None = None  # a profile's name (or RANDOM), once the user has chosen one
        self._used = threading.local()
        # Its time over that of its last stage, on this machine; None until "auto" is used.
        self._cascade_ratio: float | None = None
        # Whether bits="auto" runs its stages even where that saves no time. A server decides by times of its own.
        self.always_cascade = False
        # Who draws. The system's randomness, for a width that can be foreseen is no defense; `random.Random(seed)`
        # instead makes the widths repeat.
        self.random: random.Random = random.SystemRandom()
        self._inputs = tuple(InputInfo(i.name, tuple(i.shape), i.integer) for i in native.inputs)
        self._maps: tuple[bool, ...] | None = None  # outputs that are maps; None: not asked yet
        self._find_profiles()
        if not self._open:
            least = min((p for p in native.profiles()), key=lambda p: p.bytes)
            raise UnsupportedBits(
                f"max_bits leaves no profile of this file; the narrowest, {least.name}, needs more planes"
            )
        self.threads = threads
        self.layout = check_layout(layout)

    def _find_profiles(self) -> None:
        self._cascade: Cascade | None = None  # checked against the profiles when it is first used
        profiles = self._engine.profiles()
        self._numbers = {p.name: i for i, p in enumerate(profiles)}
        self._open = {p.name for p in profiles if p.available}
        self._accuracy = {p.name: p.accuracy for p in profiles}
        self._bytes = {p.name: p.bytes for p in profiles}

    # --- Open and closed ---------------------------------------------------------------------------------------

    @property
    def _engine(self) -> _native.Model:
        if self._opened is None:
            raise ModelClosed(f"this model ({self._source.name}) is closed; load it again to use it")
        return self._opened

    def close(self) -> None:
        """Release the memory. Calls that other threads have begun end as usual; new ones raise ModelClosed."""
        self._opened = None

    @property
    def closed(self) -> bool:
        return self._opened is None

    def __enter__(self) -> PackedModel:
        self._engine  # noqa: B018  # a closed model says so here
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> PackedModel:
        """Shares the weights, which nothing changes; has bits, threads, layout and an end of its own."""
        return self._with_settings(PackedModel(self._engine, self._source))

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedModel:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self._engine  # noqa: B018  # a closed model says so here, not where it is unpickled
        drawn = None if isinstance(self.random, random.SystemRandom) else self.random
        settings = (self._chosen, self.threads, self.layout, self.check_finite, drawn)
        return _reopen, (self._source, settings)

    def _with_settings(self, other: PackedModel) -> PackedModel:
        other._chosen, other.check_finite = self._chosen, self.check_finite
        other.threads, other.layout = self.threads, self.layout
        if not isinstance(self.random, random.SystemRandom):
            other.random = copy.copy(self.random)
        return other

    # --- Precision ---------------------------------------------------------------------------------------------

    @property
    def bits(self) -> Bits:
        """The width calls run at (a mixed profile's name, or "random"); set it at any time, it costs nothing."""
        return int(self.profile) if self.profile.isdigit() else self.profile

    @bits.setter
    def bits(self, bits: Bits) -> None:
        if is_random(bits):
            self.drawn_among(bits)  # refuses what cannot be drawn now, not at some later call
            self._chosen = str(bits)
        elif self._is_auto(bits):
            self.cascade  # noqa: B018  # a file without one says so here
            self._chosen = AUTO
        else:
            self._chosen = self._find(bits)

    @property
    def last_bits(self) -> Bits | None:
        """What this thread's last call ran at, such as the width that "random" drew; None before the first call."""
        name = getattr(self._used, "name", None)
        return int(name) if name is not None and name.isdigit() else name

    @property
    def last_stages(self) -> tuple[Bits, ...] | None:
        """The width that answered each input of this thread's last call with bits="auto"; None before the first."""
        return getattr(self._used, "stages", None)

    @property
    def cascade(self) -> Cascade:
        """What bits="auto" does, as `anyprec cascade` stored it in the file."""
        if self._source.cascade is None:
            raise CascadeError(
                f"bits='auto' needs a cascade, and this file has none; `anyprec cascade {self._source.name}` adds one"
            )
        if self._cascade is None:
            self._cascade = Cascade.from_text(self._source.cascade, self.profiles)
        return self._cascade

    @property
    def has_cascade(self) -> bool:
        """Whether the file has one, so that bits="auto" can run."""
        return self._source.cascade is not None and AUTO not in self._numbers

    def _is_auto(self, bits: object) -> bool:
        return isinstance(bits, str) and bits == AUTO and AUTO not in self._numbers

    def drawn_among(self, bits: Bits = RANDOM) -> tuple[int, ...]:
        """The widths that "random" draws from: all of 1..8 that can run now; of "random:2,4,8", those named."""
        _, colon, listed = str(bits).partition(":")
        if colon:
            return tuple(int(self._find(width)) for width in parse_widths(listed))
        widths = tuple(width for width in self.widths if width != FLOAT)
        if not widths:
            raise UnsupportedBits(
                f"bits={bits!r} draws among the widths 1..8, and this model file has {', '.join(self.profiles)} only"
            )
        return widths

    @property
    def profile(self) -> str:
        if self._chosen is not None:
            return self._chosen
        widths = self.widths
        return str(max(widths)) if widths else next(name for name in self._numbers if name in self._open)

    @profile.setter
    def profile(self, name: str) -> None:
        self.bits = name

    @property
    def widths(self) -> tuple[int, ...]:
        """Uniform widths that can run now; 32 is float."""
        return tuple(sorted(int(name) for name in self._open if name.isdigit()))

    @property
    def profiles(self) -> tuple[str, ...]:
        """All profiles that can run now, mixed ones among them."""
        return tuple(name for name in self._numbers if name in self._open)

    def accuracy(self, bits: Bits | None = None) -> float | None:
        """The accuracy in percent noted in the file, where there is one; of "random" the mean of what it draws from."""
        bits = self.bits if bits is None else bits
        if self._is_auto(bits):
            return self.cascade.accuracy
        names = map(str, self.drawn_among(bits)) if is_random(bits) else [self._find(bits)]
        values = [self._accuracy[name] for name in names]
        value = sum(values) / len(values)
        return None if math.isnan(value) else value

    def bytes_needed(self, bits: Bits) -> int:
        """How many bytes from the start of the file a width needs; for "random", the widest of its widths."""
        name = str(max(self.drawn_among(bits))) if is_random(bits) else str(bits)
        if self._is_auto(bits):
            return max(self._bytes[stage.profile] for stage in self.cascade.stages)
        return self._bytes[name if name in self._bytes else self._find(bits)]

    def refresh(self) -> tuple[int, ...]:
        """Look for planes that arrived since (a file still being downloaded); the widths that can run now."""
        if self._engine.refresh():
            self._find_profiles()
        return self.widths

    def _choose(self, bits: Bits | None) -> str:
        """The profile of one call. The thread's own note of it is `last_bits`."""
        bits = self.profile if bits is None else bits
        name = str(self.random.choice(self.drawn_among(bits))) if is_random(bits) else self._find(bits)
        self._used.name = name
        return name

    def _find(self, bits: Bits) -> str:
        name = bits if isinstance(bits, str) else str(check_bits(bits))
        if name in self._numbers and name not in self._open:
            self.refresh()
        if name in self._open:
            return name
        have = ", ".join(self.profiles)
        if name in self._numbers:
            raise UnsupportedBits(
                f"bits={name} is in the file but not loaded (there are {have}); load it without max_bits, or wait for "
                "the rest of the file"
            )
        near = get_close_matches(name, self._numbers, 1)
        hint = f"; did you mean {near[0]!r}?" if near and not name.isdigit() else ""
        if name == str(FLOAT):
            hint = "; pack it with --float (keep_float=True) to have 32"
        raise UnsupportedBits(f"bits={bits!r} is not in this model file, which has {have}{hint}")

    # --- Running -----------------------------------------------------------------------------------------------

    def __call__(
        self,
        *inputs: np.ndarray | Bits | None,
        bits: Bits | None = None,
        layout: str | None = None,
        threads: int | None = None,
        cancel: CancelToken | None = None,
        threshold: float | None = None,
        **named: np.ndarray,
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run a batch: (N, C, H, W), or (N, H, W, C) with layout="NHWC"; one image (three axes) or vectors (N, F) too.

        inputs: float32; uint8 where the file says how images become floats; any integer type where the input holds
            whole numbers. Models with several inputs take them in the order of `inputs`, or by name. Inputs that are no
            images have the shape that `inputs` says, N first. An empty batch gives an empty answer.
        bits: a width or the name of a profile, instead of `self.bits`; "random" draws a width for this call, and
            `last_bits` tells which; "auto" runs the file's cascade. It may stand behind the inputs without its name.
        layout, threads: instead of those given to `load`.
        cancel: a CancelToken; once it is cancelled, or its time is up, the call raises Cancelled at its next step.
        threshold: with bits="auto", how sure an answer must be (0 to 1) to stay, instead of what the file says.

        Vectors come out as (N, C), maps in the layout of the input, values of other than three axes as they are;
        several outputs as a tuple.
        """
        self._engine  # noqa: B018  # a closed model says so first
        beyond = len(inputs) == len(self._inputs) + 1
        if inputs and (beyond or inputs[-1] is None or isinstance(inputs[-1], (int, str, np.integer))):
            bits = inputs[-1] if bits is None else bits  # type: ignore[assignment]
            inputs = inputs[:-1]
        is_auto = self._is_auto(self.profile if bits is None else bits)
        if threshold is not None and not is_auto:
            raise InputError("threshold= is how sure a cascade must be; it goes with bits='auto'")
        name = AUTO if is_auto else self._choose(bits)
        layout = self.layout if layout is None else check_layout(layout)
        given = in_order(self._inputs, inputs, named)
        single = np.ndim(given[0]) == 3 and len(self._inputs[0].shape) == 3
        arrays = input_arrays(self._inputs, given, layout)
        threads = check_threads(self.threads if threads is None else threads)
        count = len(arrays[0])
        if not count:  # one image of zeros is run, for its shape and every complaint there may be
            arrays = [np.zeros((1, *x.shape[1:]), x.dtype) for x in arrays]

        passes = Passes(self, arrays, threads, layout, cancel)
        made = self._run_cascade(passes, threshold, count) if is_auto else passes.run(name)
        outputs = tuple(output_array(y[:count], layout, single, self._is_map(i, y.shape)) for i, y in enumerate(made))
        return outputs[0] if len(outputs) == 1 else outputs

    def _is_map(self, output: int, shape: Sequence[int]) -> bool:
        """Whether an output of one pixel is a map, of a small image, and not a vector: larger images give more."""
        if len(shape) != 4 or (shape[1], shape[2]) != (1, 1):
            return True
        if self._maps is None:
            first = self._inputs[0].shape
            self._maps = ()
            if len(self._inputs) == 1 and len(first) == 3 and not all(first):
                with contextlib.suppress(InputError):
                    found = self._engine.output_shapes([[1, first[0] or LARGE_SIDE, first[1] or LARGE_SIDE, first[2]]])
                    self._maps = tuple(len(s) == 4 and s[1] * s[2] > 1 for s in found)
        return output < len(self._maps) and self._maps[output]

    def _run_cascade(self, passes: Passes, threshold: float | None, count: int) -> list[np.ndarray]:
        """The file's cascade; with a threshold of the caller's, whether it saves time or not."""
        cascade = self.cascade
        if threshold is not None:
            cascade = answering.with_threshold(cascade, threshold)
        elif not self.always_cascade:
            if self._cascade_ratio is None:
                self._cascade_ratio = answering.time_ratio(cascade, passes.first_image())
                if self._cascade_ratio > answering.PAYS:
                    warnings.warn(
                        f"fewer bits save no time here ({self.isa}): the cascade would take {self._cascade_ratio:.2f} "
                        f"of the time of {cascade.last} bit, so bits='auto' stays at {cascade.last}",
                        stacklevel=3,
                    )
            if self._cascade_ratio > answering.PAYS:
                self._used.name, self._used.stages = cascade.last, (_as_bits(cascade.last),) * count
                return passes.run(cascade.last)
        outputs, stopped = answering.answer(cascade, len(passes.arrays[0]), passes)
        names = [_as_bits(stage.profile) for stage in cascade.stages]
        self._used.name, self._used.stages = AUTO, tuple(names[i] for i in stopped[:count])
        return outputs

    def predict(
        self, x: Any, bits: Bits | None = None, *, top: int = 5, layout: str | None = None, threads: int | None = None
    ) -> Answer | list[Answer]:
        """What is in a picture: its `top` classes with label and probability, most likely first; for segmentation, the
        class of each pixel (LabelMap).

        `x` is a path, a Pillow image, an array of pixels ((H, W, 3), (3, H, W) or (H, W), uint8), or a list of those,
        which gives a list; so does an array of several pictures. Each is prepared as in training, as the file says. A
        model whose file does not say how takes arrays as a call does.
        """
        from anyprec.run.predict import predict

        return predict(self, x, bits, top, layout, threads)

    def output_shapes(self, n: int, height: int, width: int) -> list[tuple[int, ...]]:
        """What `n` images of this size give, before they are run: (N, C), or (N, C, H, W) and (N, H, W, C)."""
        found: list[tuple[int, ...]] = []
        for i, shape in enumerate(self._engine.output_shapes([[n, height, width, self.input_shape[2]]])):
            if len(shape) != 4:
                found.append(tuple(shape))
                continue
            count, h, w, c = shape
            is_map = self._is_map(i, shape)
            found.append((count, c) if not is_map else (count, c, h, w) if self.layout == "NCHW" else (count, h, w, c))
        return found

    @property
    def threads(self) -> int:
        """How many threads one call may use."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = check_threads(threads)

    # --- About -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def isa(self) -> str:
        """The instruction set it runs on."""
        return self._engine.isa

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._engine.labels)

    @property
    def input_shape(self) -> tuple[int | None, int | None, int]:
        """H, W, C of the images it takes; None where any size will do."""
        first = self._inputs[0]
        if len(first.shape) != 3:
            shape = ", ".join("any" if n is None else str(n) for n in self.inputs[first.name])
            raise InputError(
                f"{self.name} takes no images, but arrays (N, {shape}); load it in Python, and call it with them"
            )
        return first.shape[0] or None, first.shape[1] or None, first.shape[2]

    @property
    def inputs(self) -> dict[str, tuple[int | None, ...]]:
        """The shape of every input, without N; images are H, W, C. None where any size will do."""
        return {info.name: tuple(size or None for size in info.shape) for info in self._inputs}

    @property
    def image_size(self) -> tuple[int, int] | None:
        """H, W of the images it was made for; None where it takes any, and the file does not say."""
        height, width = self._engine.image_height, self._engine.image_width
        return (height, width) if height and width else None

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How its training turned pictures into images; None where the file does not say."""
        how = self._engine.preprocessing
        if not how.resize:
            return None
        to = (how.height, how.width) if how.height else None
        return Preprocessing.from_image(
            how.scale, how.shift, size=self.image_size if to else None, resize=how.resize, to=to,
            filter=how.filter or "bilinear",
        )  # fmt: skip

    @property
    def takes_uint8(self) -> bool:
        return self._engine.takes_bytes

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held now: the file as far as it was read, prepared weights of the widths in use, working memory."""
        native = self._engine
        return {"file": native.loaded_bytes, "panels": native.panel_bytes, "arenas": native.arena_bytes}

    def steps(
        self,
        x: np.ndarray | Sequence[np.ndarray],
        bits: Bits | None = None,
        *,
        threads: int | None = None,
        layout: str | None = None,
        repeat: int = 10,
    ) -> list[_native.StepInfo]:
        """Every step of a run: its kernel, what is fused into it, its products, its median time.

        x: the input, or a list of all inputs.
        """
        number = self._numbers[self._choose(bits)]
        layout = self.layout if layout is None else check_layout(layout)
        threads = check_threads(self.threads if threads is None else threads)
        given = in_order(self._inputs, tuple(x) if isinstance(x, (list, tuple)) else (x,), {})
        arrays = input_arrays(self._inputs, given, layout)
        return self._engine.steps(arrays, number, max(1, int(repeat)), threads, layout == "NCHW")

    def __repr__(self) -> str:
        if self.closed:
            return f"PackedModel({self._source.name!r}, closed)"
        return f"PackedModel({self.name!r}, bits={self.bits}, profiles={', '.join(self.profiles)}, isa={self.isa})"


class Passes:
    """The runs of one call, for answering.py: the first over all inputs, later ones over some of them.

    What no profile changes, such as a float stem, is computed by the first and kept for the others.
    """

    def __init__(
        self, model: PackedModel, arrays: list[np.ndarray], threads: int, layout: str, cancel: CancelToken | None = None
    ) -> None:
        self.model, self.arrays, self.threads, self.layout, self.cancel = model, arrays, threads, layout, cancel
        self._native = model._engine
        self._kept: _native.KeptRun | None = None

    def first_image(self) -> Passes:
        return Passes(self.model, [x[:1] for x in self.arrays], self.threads, self.layout, self.cancel)

    def run(self, profile: str) -> list[np.ndarray]:
        """All inputs, and nothing kept."""
        model = self.model
        number = model._numbers[profile]
        return self._native.run(
            self.arrays, number, self.threads, self.layout == "NCHW", model.check_finite, self.cancel
        )

    def begin(self, profile: str) -> list[np.ndarray]:
        model = self.model
        outputs, self._kept = self._native.run_keeping(
            self.arrays, model._numbers[profile], self.threads, self.layout == "NCHW", model.check_finite, self.cancel
        )
        return outputs

    def go_on(self, rows: np.ndarray, profile: str) -> list[np.ndarray]:
        """These inputs, by their numbers, from what `begin` has kept."""
        assert self._kept is not None
        return self._kept.run(rows, self.model._numbers[profile], self.threads, self.cancel)


def _reopen(source: ModelSource, settings: tuple[Any, ...]) -> PackedModel:
    """A model out of a pickle: its file, opened again."""
    made = PackedModel(source.reopen(), source)
    made._chosen, made.threads, made.layout, made.check_finite, drawn = settings
    if drawn is not None:
        made.random = drawn
    return made


def _as_bits(profile: str) -> Bits:
    return int(profile) if profile.isdigit() else profile


def is_random(bits: object) -> bool:
    """Whether this asks for a drawn width: "random", or "random:2,4,8"."""
    return isinstance(bits, str) and (bits == RANDOM or bits.startswith(RANDOM + ":"))


def all_finite(x: np.ndarray) -> bool:
    """Whether no number of `x`, float32 or uint8, is NaN or infinite; a call refuses such input."""
    return x.dtype == np.uint8 or _native.all_finite(np.ascontiguousarray(x))
