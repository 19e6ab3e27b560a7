"""A training run: a Recipe and a folder in, a trained model, its checkpoint and its logs out.

`train(recipe, out)` is what `anyprec train` calls. The folder holds recipe.toml, last.pt (the run so far), log.jsonl,
tensorboard/ and, at the end, model.pt. Everything random is a function of (seed, step), and the checkpoint holds the
rest, so a run that was killed goes on to the result of one that was not, bit for bit. Under `torchrun` each process
takes its rows of the same global batch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anyprec.data import IGNORED, batches, load_data, steps_per_epoch
from anyprec.data.augment import find_augment
from anyprec.data.catalog import DATASETS, Data, balanced_subset, hold_out, renormalized
from anyprec.data.sets import PHOTO_MEAN, PHOTO_STD
from anyprec.errors import CheckpointError, Diverged, RecipeError
from anyprec.files import cannot_write, locked
from anyprec.nn.act_quantizer import ActQuantizer
from anyprec.nn.calibrate import calibrate, estimate_norms
from anyprec.nn.layers import use_winograd
from anyprec.nn.new_widths import fit_widths
from anyprec.nn.norms import sync_norms
from anyprec.nn.quantizers import kurtosis_penalty, set_sign_window
from anyprec.nn.split import SplitNetwork
from anyprec.nn.switching import any_layers, set_bits
from anyprec.progress import Progress
from anyprec.training import checkpoint
from anyprec.training.average import WeightAverage
from anyprec.training.build import build_network, check_task, model_file_of, trained_preprocessing
from anyprec.training.evaluate import evaluate, to_tensor
from anyprec.training.half_precision import require_half_precision
from anyprec.training.joint import choose_widths, joint_step, random_bits, shares_stem
from anyprec.training.optimizers import learning_rate, make_optimizer
from anyprec.training.processes import Processes, average_gradients
from anyprec.training.recipe import Recipe
from anyprec.training.run_folder import RunLog, clear_run, open_folder
from anyprec.training.teacher import Teacher
from anyprec.widths import FLOAT

NORMALIZATIONS = {"imagenet": (PHOTO_MEAN, PHOTO_STD)}  # of recipes, beside that of the data set
NORM_BATCHES = 16  # for the norm statistics of averaged weights


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_root: str | Path | None = None,
    download: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    model: nn.Module | None = None,
    progress: bool = True,
) -> dict[int | str, dict[str, float]]:
    """Train as `recipe` says; returns bits -> {"accuracy", "loss"} on the test set, and "miou" for segmentation.

    out: the folder for model.pt, logs and checkpoints. A folder that holds a run is refused, unless `resume` continues
        that run or `overwrite` starts over.
    data_root: the folder of the data set.
    download: fetches what is missing there.
    device: such as "cpu" or "cuda:1"; by default a GPU if there is one.
    model: a network of your own, converted; without it the recipe's net is built.
    progress: shows a progress line, and the results of each epoch.
    """
    processes = Processes(device)
    try:
        if recipe.amp != "off" and processes.device.type == "cpu":
            require_half_precision(recipe.amp)
        if recipe.winograd and processes.device.type != "cpu":
            raise RecipeError(f"winograd=true is for CPUs, and this run is on {processes.device}; set it to false")
        # The first process holds the folder for all; were it refused, the others would end with it.
        with locked(out) if processes.first else nullcontext():
            if overwrite and not resume:
                if processes.first:
                    clear_run(Path(out))
                processes.wait_for_all()
            return TrainingRun(recipe, Path(out), processes, data_root, download, resume, model, progress).go()
    finally:
        processes.close()


class TrainingRun:
    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        processes: Processes,
        data_root: str | Path | None,
        download: bool,
        resume: bool,
        model: nn.Module | None,
        progress: bool,
    ) -> None:
        self.recipe, self.out, self.processes = recipe, out, processes
        self.progress = progress and processes.first
        self.new_widths: list[int] = []  # those that the checkpoint of `init` was not trained for
        saved = open_folder(out, recipe, resume, writes=processes.first)
        # Processes on one machine download once: the reader locks the folder.
        self.train_data, self.test_data = load_splits(recipe, data_root, download)
        self.split = "validation" if recipe.validation else "test"  # what results are of
        self.steps = steps_per_epoch(self.train_data, recipe.batch_size, True)
        if model is None:
            check_task(recipe, self.train_data)

        self.teacher = Teacher(recipe.teacher, self.train_data) if recipe.teacher else None
        torch.manual_seed(recipe.seed)
        if model is None:
            model, self.new_widths = build_network(recipe, self.train_data)
            if saved is None:
                self._check_normalization()
                self._unpack(model)
        self.model = model.to(processes.device)
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if recipe.winograd:
            use_winograd(self.model, recipe.gradients)
        self._fit_stem()
        self._fit_ranges()
        sync_norms(self.model, recipe.sync_norm)
        set_sign_window(self.model, sign_window(recipe, 0.0))
        self.optimizer = make_optimizer(self.model, recipe)
        self.scaler = torch.amp.GradScaler(processes.device.type) if recipe.amp == "fp16" else None
        self.average = WeightAverage(self.model, recipe.average) if recipe.average else None
        self.epoch, self.step = 0, 0  # the next step is number `step` of epoch `epoch`
        self.totals: dict[int, list[float]] = {}  # bits -> [loss sum, right, images] of this epoch so far
        self.log = RunLog(out)
        if saved is not None:
            self._restore(saved)
        processes.share(self.model)
        if recipe.compile:
            self._compile()

    # --- The loop ----------------------------------------------------------------------------------------------------

    def go(self) -> dict[int | str, dict[str, float]]:
        results: dict[int | str, dict[str, float]] = {}
        total, done = self.recipe.epochs * self.steps, self.epoch * self.steps + self.step
        with Progress("train", total=total, unit="step", done=done) if self.progress else nullcontext() as bar:
            while self.epoch < self.recipe.epochs:
                self._epoch(bar)
                results = {}
                last = self.epoch == self.recipe.epochs
                if last or (self.recipe.eval_every and self.epoch % self.recipe.eval_every == 0):
                    results = self._evaluate()
                self._note_epoch(results)
                if bar is not None and results:
                    bar.write(f"epoch {self.epoch}/{self.recipe.epochs}  {self.split} {summary_line(results)}")
                self._save()
        if not results:  # resumed after the last epoch
            results = self._evaluate()
        if self.processes.first:
            extra = {
                "recipe": self.recipe.to_dict(),
                self.split: {str(k): v for k, v in results.items()},
                **checkpoint.training_facts(self.train_data, eval_augment(self.recipe.augment)),
            }
            with self._averaged():
                checkpoint.save_model(self.model, self.out / "model.pt", extra)
        self.log.close()
        return results

    def _epoch(self, bar: Progress | None) -> None:
        recipe, processes = self.recipe, self.processes
        self.model.train()
        source = batches(
            self.train_data, recipe.batch_size, augment=recipe.augment, train=True, seed=recipe.seed,
            epoch=self.epoch, start=self.step, rank=processes.rank, world=processes.world,
        )  # fmt: skip
        saved_at = time.monotonic()
        epoch = f"{self.epoch + 1}/{recipe.epochs}"
        for images, labels in source:
            losses = self._step(images, labels)
            if bar is not None:
                ends = {f"loss{bits}": losses[bits] for bits in (max(losses), min(losses))}
                bar.update(1, epoch=epoch, **ends)
            if time.monotonic() - saved_at >= 60 * recipe.save_minutes and self.step < self.steps:
                self._save()
                saved_at = time.monotonic()
        self.epoch, self.step = self.epoch + 1, 0

    def _step(self, images: Any, labels: Any) -> dict[int, float]:
        recipe, device = self.recipe, self.processes.device
        number = self.epoch * self.steps + self.step
        # Dropout is a function of the step, too; the factor keeps neighboring seeds and ranks apart.
        torch.manual_seed(recipe.seed + 1_000_003 * (number * self.processes.world + self.processes.rank))
        rate = learning_rate(recipe, number, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_factor"]
        x, y = to_tensor(images, device), torch.from_numpy(labels).to(device)
        if recipe.sign_window_end:
            set_sign_window(self.model, sign_window(recipe, number / max(recipe.epochs * self.steps - 1, 1)))
        widths = choose_widths(recipe.widths, recipe.sampling, recipe.sandwich_random, recipe.seed, number)

        self.optimizer.zero_grad(set_to_none=True)
        scaled: Callable[[torch.Tensor], Any] = torch.Tensor.backward
        if self.scaler is not None:
            scaler = self.scaler
            scaled = lambda value: torch.autograd.backward(scaler.scale(value))  # noqa: E731
        count = self._labeled(y)
        results = joint_step(
            self.model, x, y, widths, loss=recipe.loss, label_weight=recipe.label_weight,
            label_smoothing=recipe.label_smoothing,
            width_weights={int(k): w for k, w in recipe.width_weights.items()}, count=count,
            teacher=self._taught(images),
            mixed=random_bits(self.model, recipe.widths, recipe.mixed_bits, recipe.seed, number),
            autocast=self._autocast, backward=scaled,
        )  # fmt: skip
        if recipe.kurtosis:
            penalties = [kurtosis_penalty(layer.weight) for layer in any_layers(self.model).values()]
            scaled(recipe.kurtosis * torch.stack(penalties).sum())
        numbers = torch.stack([torch.stack([v, r.to(v.dtype)]) for v, r in results.values()])  # (widths, 2)
        if self.processes.world > 1:
            numbers = average_gradients(list(self.model.parameters()), numbers)
        self._check_finite(dict(zip(results, numbers[:, 0].tolist(), strict=True)))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model)
        for bits, (value, right) in zip(results, numbers.tolist(), strict=True):
            total = self.totals.setdefault(bits, [0.0, 0.0, 0.0])
            for i, part in enumerate((value * count, right, count)):
                total[i] += part
        self.step += 1
        return {bits: value for bits, (value, _) in zip(results, numbers.tolist(), strict=True)}

    def _taught(self, images: np.ndarray) -> torch.Tensor | None:
        """The teacher's logits for the images of a step."""
        return None if self.teacher is None else self.teacher(images).to(self.processes.device)

    def _labeled(self, labels: torch.Tensor) -> float:
        """Images, or labeled pixels, of the batch; of several processes the mean, so that each pixel counts alike."""
        if labels.dim() == 1:
            return len(labels)
        count = (labels != IGNORED).sum().double()
        if self.processes.world > 1:
            torch.distributed.all_reduce(count)
            count /= self.processes.world
        return max(count.item(), 1.0)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.recipe.amp == "off":
            return nullcontext()
        kind = torch.bfloat16 if self.recipe.amp == "bf16" else torch.float16
        return torch.autocast(self.processes.device.type, kind)

    def _check_finite(self, losses: dict[int, float]) -> None:
        bad = [bits for bits, value in losses.items() if not math.isfinite(value)]
        if bad:
            last = self.out / "last.pt"
            kept = f"the last good checkpoint is {last}" if last.exists() else "no checkpoint had been written yet"
            raise Diverged(
                f"the loss at {bad[0]} bit is {losses[bad[0]]} in epoch {self.epoch + 1}, step {self.step + 1}; "
                f"{kept}; lower lr (now {self.recipe.lr:g}), add warmup_epochs, or check the data for NaN"
            )

    # --- Building, evaluating, keeping -------------------------------------------------------------------------------

    def _compile(self) -> None:
        # A graph per width, in training and in evaluation: 10 for five widths, above torch's default limit of 8.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        part = "body" if shares_stem(self.model) else "forward"
        setattr(self.model, part, torch.compile(getattr(self.model, part), dynamic=False))

    def _unpack(self, model: nn.Module) -> None:
        """Where `init` names a model file, the network starts with its answers."""
        path = model_file_of(self.recipe.init) if self.recipe.init else None
        if path is not None:
            from anyprec.packing.unpack import unpack

            unpack(model, path, [images.cpu() for images in self._images(NORM_BATCHES)])

    def _check_normalization(self) -> None:
        """Refuses images normalized otherwise than in the training of `init`, where the recipe could say the same."""
        how = trained_preprocessing(self.recipe.init) if self.recipe.init else None

        def same(mean: Sequence[float], std: Sequence[float]) -> bool:
            return how is None or np.allclose((*how.mean, *how.std), (*mean, *std), atol=1e-4)

        spec = DATASETS[self.recipe.data]
        if how is None or how.channels != len(spec.mean) or same(self.train_data.mean, self.train_data.std):
            return
        known = {"dataset": (spec.mean, spec.std), **NORMALIZATIONS}
        if fits := [name for name, pair in known.items() if same(*pair)]:
            raise RecipeError(
                f"init={self.recipe.init!r} was trained with normalization={fits[0]!r}, this recipe has "
                f"{self.recipe.normalization!r}; give it the same: --set normalization={fits[0]}"
            )

    def _fit_stem(self) -> None:
        """A stem that whitens is made from training images; with `init`, it came with the other weights."""
        model = self.model
        if isinstance(model, SplitNetwork) and model.stem_images and not self.recipe.init:
            count = min(model.stem_images, len(self.train_data))
            source = batches(self.train_data, count, augment=eval_augment(self.recipe.augment), prefetch=0)
            model.fit_stem(to_tensor(next(source)[0], self.processes.device))

    def _fit_ranges(self) -> None:
        """Networks whose activation ranges come from data get them from the first training batches."""
        acts = [m for m in self.model.modules() if isinstance(m, ActQuantizer) and m.clip != "fixed"]
        if any(r.item() == 0 for act in acts for r in act.ranges.values()):
            calibrate(self.model, self._images(4), [k for k in self.recipe.widths if k != FLOAT], ranges=True)
        elif self.new_widths:
            fit_widths(self.model, self.new_widths, self._images(8))

    def _images(self, count: int) -> list[torch.Tensor]:
        """The images of the first training batches."""
        source = batches(self.train_data, self.recipe.batch_size, augment=self.recipe.augment, train=True)
        return [to_tensor(images, self.processes.device) for _, (images, _) in zip(range(count), source, strict=False)]

    def _evaluate(self) -> dict[int | str, dict[str, float]]:
        """Each process evaluates its rows of the test set; averaged weights where the recipe averages."""
        if not self.recipe.sync_norm:  # each process has statistics of its own, and the first one's are saved
            self.processes.share(self.model)
        with self._averaged():
            return evaluate(
                self.model, self.test_data, list(self.recipe.widths), augment=eval_augment(self.recipe.augment),
                batch_size=self.recipe.eval_batch_size, device=self.processes.device, progress=self.progress,
                rank=self.processes.rank, world=self.processes.world,
            )  # fmt: skip

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, and norm statistics measured with them."""
        if self.average is None:
            yield
            return
        with self.average.swapped(self.model):
            estimate_norms(self.model, self.recipe.widths, self._images(NORM_BATCHES))
            yield

    def _note_epoch(self, results: dict[int | str, dict[str, float]]) -> None:
        train = {
            str(bits): {"loss": total / count, "accuracy": 100 * right / count}
            for bits, (total, right, count) in sorted(self.totals.items())
        }
        self.totals = {}
        if self.processes.first:
            rate = learning_rate(self.recipe, self.epoch * self.steps - 1, self.steps)
            tested = {str(k): v for k, v in results.items()}
            self.log.write({"epoch": self.epoch, "lr": rate, "train": train, self.split: tested})

    def _save(self) -> None:
        if not self.processes.first:
            return
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise Diverged(
                f"weights became NaN or infinite in epoch {self.epoch + 1}; the last good checkpoint is kept"
            )
        log = self.out / "log.jsonl"
        record = {
            "kind": "run",
            "recipe": self.recipe.to_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "totals": self.totals,
            "log_bytes": log.stat().st_size if log.exists() else 0,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "average": self.average.values if self.average is not None else None,
        }
        checkpoint.save_state(record, self.out / "last.pt")

    def _restore(self, saved: dict[str, Any]) -> None:
        last, log = self.out / "last.pt", self.out / "log.jsonl"
        checkpoint.restore(self.model, saved["model"], last)
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.scaler is not None and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
            if self.average is not None:
                self.average.load(saved["average"])
        except Exception as error:  # torch checks little of what it loads
            raise CheckpointError(f"{last} does not fit its optimizer ({error}); restore or retrain it") from error
        self.epoch, self.step, self.totals = saved["epoch"], saved["step"], saved["totals"]
        if self.processes.first and log.exists():
            try:
                os.truncate(log, saved["log_bytes"])  # lines of epochs that will run again
            except OSError as error:
                raise cannot_write(log, error) from error
        set_bits(self.model, max(self.recipe.widths))


def load_splits(recipe: Recipe, root: str | Path | None, download: bool = False) -> tuple[Data, Data]:
    """What a recipe trains on and what it is evaluated on: the test set, or images held out from training."""
    limit = recipe.limit or None

    def load(split: str, limit: int | None = None) -> Data:
        return load_normalized(recipe, split, root, download=download, limit=limit)

    if not recipe.validation:
        return load("train", limit), load("test")
    rest, held_out = hold_out(load("train"), recipe.validation)
    return (rest if limit is None else balanced_subset(rest, limit)), held_out


def load_normalized(
    recipe: Recipe, split: str, root: str | Path | None, *, download: bool = False, limit: int | None = None
) -> Data:
    """A split of the recipe's data set, with the mean and deviation that the recipe names."""
    data = load_data(recipe.data, split, root, download=download, limit=limit)
    return data if recipe.normalization == "dataset" else renormalized(data, *NORMALIZATIONS[recipe.normalization])


def sign_window(recipe: Recipe, done: float) -> float:
    """The window of the recipe when `done` of the run, from 0 to 1, is over."""
    if len(recipe.widths) == 1:
        return 0.0  # 1 bit by itself has nobody to spare, and nothing else that brings its weights near to zero
    end = recipe.sign_window_end or recipe.sign_window
    return recipe.sign_window + done * (end - recipe.sign_window)


def summary_line(results: dict[int | str, dict[str, float]]) -> str:
    what = "miou" if all("miou" in values for values in results.values()) else "accuracy"
    figures = "  ".join(f"{'float' if k == FLOAT else k}: {v[what]:.2f}" for k, v in results.items())
    return f"{'mIoU' if what == 'miou' else what}  {figures}"


def eval_augment(augment: str) -> str:
    """What the test set needs of the training augmentation: sizes, but no randomness."""
    how = find_augment(augment)
    return augment if how.side or how.resize else "none"
