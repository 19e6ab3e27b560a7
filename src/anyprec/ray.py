"""Batch inference with Ray Data: a folder, Parquet files or a Dataset of pictures in, a Dataset of answers out.

    answers = anyprec.ray.map_images("photos", "net.apm", bits=4, workers=8)
    answers.write_parquet("answers")

Every worker is an actor with a model of its own; the model file travels through Ray's object store, so only the driver
needs it. Pictures are prepared as in training, by the code of `predict`. Needs `anyprec[ray]`; docs/guides/batch.md.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyprec.data.folder import SUFFIXES
from anyprec.errors import AnyprecError, DataError, InputError, MissingExtra
from anyprec.models.catalog import find
from anyprec.run.image_limits import check_bytes
from anyprec.run.labels import LabelMap
from anyprec.run.model import Bits, PackedModel, load
from anyprec.run.predict import Answer, answers_of_pixels, check_top, pixels, takes_arrays_only

if TYPE_CHECKING:
    import pyarrow
    import ray.data

__all__ = ["map_images"]

IMAGE_COLUMNS = ("image", "bytes", "img")  # what a column of pictures is usually called
PARQUET = ".parquet"


def map_images(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | ray.data.Dataset,
    model: str | os.PathLike[str],
    *,
    bits: Bits | None = None,
    top: int = 1,
    column: str | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    threads: int = 1,
) -> ray.data.Dataset:
    """Run a model on many pictures, on all machines of a Ray cluster. Nothing runs before the result is used.

    source: a folder of pictures (with its subfolders), picture files, Parquet files or a folder of them, or a Dataset
        with a column of encoded pictures (bytes of JPEG, PNG, ... files, or Hugging Face's {"bytes": ...}).
    model: a model file, or the name of a pretrained model.
    bits: a width, a profile, "random" or "auto"; by default the widest width of the file.
    top: so many classes, the most likely first.
    column: the pictures' column in Parquet files or a Dataset; by default "image", "bytes" or "img".
    batch_size: pictures a worker answers at a time.
    workers: processes, each with a model of its own and `threads` CPUs; by default as many as leave one CPU of the
        cluster for reading.

    The rows have the columns of the source without the picture, and of a classifier `label`, `class_index` and
    `probability` (with top > 1 also the lists `labels`, `class_indices`, `probabilities`), of a segmentation `mask`: a
    PNG file whose pixels are class numbers. A picture that cannot be read has its reason in `error` and nulls in these.
    """
    data = _ray_data()
    for name, count in (
        ("batch_size", batch_size),
        ("threads", threads),
        ("workers", 1 if workers is None else workers),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name}={count!r} is not a number of them; give 1 or more")
    check_top(top)
    path = find(os.fspath(model))
    with load(path) as opened:
        if bits is not None:
            opened.bits = bits  # refused here, not in a worker an hour later
        if takes_arrays_only(opened):
            raise InputError(f"{opened.name} takes no pictures; use Dataset.map_batches and call the model: m(x)")
    if not isinstance(source, data.Dataset):
        source = _paths(source)
    import ray

    workers = _workers(workers, threads)
    pictures, column = _pictures(data, source, column)
    made = pictures.map_batches(
        _Worker,
        fn_constructor_args=(ray.put(Path(os.fsdecode(path)).read_bytes()), column, bits, top, threads),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(size=workers),
        num_cpus=threads,
    )
    return made


def _ray_data() -> Any:
    try:
        import ray.data

        return ray.data
    except ImportError as error:
        raise MissingExtra("anyprec.ray.map_images needs Ray Data: pip install 'anyprec[ray]'") from error


def _workers(wanted: int | None, threads: int) -> int:
    """Workers reserve their CPUs: if they had all of them, they would wait for pictures for ever."""
    import ray

    if not ray.is_initialized():
        ray.init()
    cpus = int(ray.cluster_resources().get("CPU", 0))
    most = (cpus - 1) // threads
    if most < (wanted or 1):
        raise InputError(
            f"workers={wanted or 1} with threads={threads} need {(wanted or 1) * threads} CPUs and one more to read "
            f"pictures; this Ray cluster has {cpus}: give fewer, or start Ray with more (ray.init(num_cpus=...))"
        )
    return wanted or most


def _pictures(data: Any, source: Any, column: str | None) -> tuple[Any, str]:
    """A Dataset and the column that holds the pictures. `source`: a Dataset, or paths of files."""
    if not isinstance(source, data.Dataset):
        paths = source
        if not any(path.suffix.lower() == PARQUET for path in paths):
            if column is not None:
                raise InputError(f"column={column!r} is for Parquet files and Datasets; leave it out for picture files")
            return data.read_binary_files([str(path) for path in paths], include_paths=True), "bytes"
        if odd := [path for path in paths if path.suffix.lower() != PARQUET]:
            raise InputError(f"{odd[0]} is not a Parquet file as the others are; give one kind at a time")
        source = data.read_parquet([str(path) for path in paths])
    names = source.schema().names
    usual = [name for name in IMAGE_COLUMNS if name in names]
    if column is None and not usual:
        raise InputError(f"none of the columns {', '.join(names)} is called {' or '.join(IMAGE_COLUMNS)}; give column=")
    column = column or usual[0]
    if column not in names:
        raise InputError(f"there is no column {column!r}; the columns are {', '.join(names)}")
    return source, column


def _paths(source: Any) -> list[Path]:
    """Of files as given; of a folder all its Parquet files, or if it has none its pictures, with subfolders."""
    given = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    found: list[Path] = []
    for one in given:
        path = Path(one)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")]
            chosen = [p for p in inside if p.suffix.lower() == PARQUET]
            chosen = chosen or [p for p in inside if p.suffix.lower() in SUFFIXES]
            if not chosen:
                raise DataError(f"{path} has neither Parquet files nor pictures ({' '.join(SUFFIXES)}) in it")
            found += chosen
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no file or folder {path}; give pictures, Parquet files or folders of them")
    if not found:
        raise DataError("the list of paths is empty; give pictures, Parquet files or folders of them")
    return found


class _Worker:
    """In an actor: a table with a column of pictures in, a table with the answers in its place out."""

    def __init__(self, file: Any, column: str, bits: Bits | None, top: int, threads: int) -> None:
        import ray

        if isinstance(file, ray.ObjectRef):
            file = ray.get(file)
        with tempfile.NamedTemporaryFile(suffix=".apm") as copy:
            copy.write(file)
            copy.flush()
            self.model: PackedModel = load(copy.name, threads=threads)  # keeps what it reads
        self.column, self.bits, self.top = column, bits, top

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        images: list[Any] = []
        errors: list[str | None] = []
        for given in table.column(self.column).to_pylist():
            try:
                images.append(_pixels(self.model, given))
                errors.append(None)
            except AnyprecError as error:
                errors.append(str(error))
        answers = iter(answers_of_pixels(self.model, images, self.bits, self.top))
        rows = [None if error else next(answers) for error in errors]
        made = table.drop_columns([self.column])
        for name, values in _columns(rows, self.top, self.model).items():
            made = made.append_column(name, values)
        import pyarrow

        return made.append_column("error", pyarrow.array(errors, pyarrow.string()))


def _pixels(model: PackedModel, given: Any) -> Any:
    """(H, W, C) of an encoded picture: the pixels that `predict` makes of its file."""
    from PIL import Image

    data = given.get("bytes") if isinstance(given, Mapping) else given
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InputError(f"a picture must be the bytes of an image file; this row has {type(data).__name__}")
    data = bytes(data)
    check_bytes(data)
    try:
        picture = Image.open(io.BytesIO(data))
    except Exception as error:  # Pillow's readers raise whatever they meet in broken data
        raise InputError(f"the picture cannot be read: {error or type(error).__name__}") from error
    return pixels(model, picture, None)


def _columns(rows: Sequence[Answer | None], top: int, model: PackedModel) -> dict[str, pyarrow.Array]:
    """Typed, so that a batch without a single answer has the columns of the others."""
    import pyarrow as pa

    if len(model.output_shapes(1, *(model.image_size or (256, 256)))[0]) == 4:
        masks = [_png(row) if isinstance(row, LabelMap) else None for row in rows]
        return {"mask": pa.array(masks, pa.binary())}
    names = ("label", "class_index", "probability")
    kinds = (pa.string(), pa.int64(), pa.float64())
    lists: dict[str, list[Any]] = {
        name: [None if row is None else [getattr(one, name) for one in row] for row in rows]  # type: ignore[union-attr]
        for name in names
    }
    made = {
        name: pa.array([None if row is None else row[0] for row in lists[name]], kind)
        for name, kind in zip(names, kinds, strict=True)
    }
    if top > 1:
        several = ("labels", "class_indices", "probabilities")
        for name, plural, kind in zip(names, several, kinds, strict=True):
            made[plural] = pa.array(lists[name], pa.list_(kind))
    return made


def _png(answer: LabelMap) -> bytes:
    from PIL import Image

    classes = answer.classes
    file = io.BytesIO()
    Image.fromarray(classes.astype("uint8" if classes.max(initial=0) < 256 else "uint16")).save(file, "PNG")
    return file.getvalue()
