"""Every row is a mistake that a user can make, and the one line that answers it, through `main` as it is typed."""

# ruff: noqa: E501 - answers are quoted whole

from __future__ import annotations

import logging
import re
import socket
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Bad:
    """A mistake on the command line or in a file, and its answer.

    Attributes:
        line: the arguments, separated by single spaces; FILES stands for the directory that `files` fills, CLOSED for a
            local address at which nothing listens.
        answer: what stands after "mp_hydra: " on stderr; `re:` in front makes it a pattern for the whole of it.
        recorded: whether the run was open by then, and so must be there as FAILED.
    """

    line: str
    answer: str
    recorded: bool = False


POSITIVE = "give an integer of at least 1"
OPTIONS = "auto, fp32, mixed_bfloat16, mixed_float16, tf32"
NO_PRECISION = f"no such option; known here: {OPTIONS}"
GRAMMAR = (
    "not of the form key=value; close brackets and quotes, and quote text with special characters, as in 'key=\"a, b\"'"
)
TARGET = "give a dotted path such as my_module.my_function"
UNIT = "give a number of at least 0 and below 1"
FITS = "it does not fit the model's outputs and the dataset's targets"

COMMAND = [
    Bad(
        "precison=mixed_float16",
        "precison: no such key; did you mean precision?; to add a key that is not in the config write +precison=...",
    ),
    Bad(
        "optimizer.lr=0.1",
        "re:optimizer.lr: no such key; known here: _target_, .*learning_rate.*; to add a key .* write \\+optimizer.lr=...",
    ),
    Bad(
        "compile.losss=mse",
        "compile.losss: no such key; did you mean loss?; to add a key that is not in the config write +compile.losss=...",
    ),
    Bad("+epoch=3", "epoch=3: no such key; did you mean epochs?"),
    Bad("+tracking.uris=x", "tracking.uris=x: no such key; did you mean uri?"),
    Bad("callbacks.x=1", "callbacks.x: no such key; to add a key that is not in the config write +callbacks.x=..."),
    Bad(
        "precision=mixed_flaot16",
        "precision=mixed_flaot16: no such option; did you mean mixed_float16 or mixed_bfloat16?",
    ),
    Bad(
        "precision=Mixed-Float16",
        "precision=Mixed-Float16: no such option; did you mean mixed_float16 or mixed_bfloat16?",
    ),
    Bad("precision=16", f"precision=16: {NO_PRECISION}"),
    Bad("precision=true", f"precision=true: {NO_PRECISION}"),
    Bad("precision=null", f"precision=null: choose an option of the group; known here: {OPTIONS}"),
    Bad("-m precision=fp32,null", f"precision=null: choose an option of the group; known here: {OPTIONS}"),
    Bad("model=cn", "model=cn: no such option; did you mean cnn?"),
    Bad("model=null", "re:model=null: choose an option of the group; known here: application, cnn, .*"),
    Bad("experiment=null", "experiment=null: leave it out for none"),
    Bad("experiment=mnist_cn", "experiment=mnist_cn: no such option; did you mean mnist_cnn?"),
    Bad(
        "callbacks=[csv,early]",
        "callbacks=early: no such option; known here: checkpoint, csv, early_stopping, none, reduce_lr, tensorboard",
    ),
    Bad("hydra/launcher=nope", "re:hydra/launcher=nope: no such option; known here: .*basic.*"),
    Bad("~model", "model=???: choose one of the options of the group, model=..."),
    Bad("~epochs", "epochs=???: give a value"),
    Bad("~precision.policy", "precision.policy: PrecisionConfig (DictConfig) does not support deletion"),
    Bad("~optimizer._target_", f"optimizer._target_=null: {TARGET}"),
    Bad(
        "batch_size=1,2",
        "batch_size=1,2: several values make a sweep, which needs -m; a list is written batch_size=[1,2]",
    ),
    Bad("batch_size=range(1,3)", "batch_size=range(1,3): several values make a sweep, which needs -m"),
    Bad("+batch_size=3", "batch_size: it is in the config already; write batch_size=... without +"),
    Bad("+precision=fp32", "precision: it is chosen already; write precision=... without +"),
    Bad("++precision=fp32", "precision=fp32: write it without +"),
    Bad("batch_size", f"batch_size: {GRAMMAR}"),
    Bad("batch_size=[1,2", f"batch_size=[1,2: {GRAMMAR}"),
    Bad("größe=1", f"größe=1: {GRAMMAR}"),
    Bad("--config-name nope", "re:there is no config nope in /.*/conf"),
    Bad("--config-dir FILES/nowhere", "Additional config directory 'FILES/nowhere' not found"),
    Bad("hydra.run.dir=FILES/good.npz/x", "FILES/good.npz/x: Not a directory"),
]

CONFIG_FILE = [
    Bad(
        "--config-dir FILES/conf model=broken", "FILES/conf/model/broken.yaml, line 2: expected ',' or ']', but got ':'"
    ),
    Bad("--config-dir FILES/conf model=twice", "FILES/conf/model/twice.yaml, line 2: found duplicate key a"),
    Bad("--config-dir FILES/conf model=latin", "re:FILES/conf/model/latin.yaml: it is not UTF-8 text \\(.*\\)"),
    Bad(
        "--config-dir FILES/conf model=unclosed",
        "FILES/conf/model/unclosed.yaml: x: no viable alternative at input '${a'",
    ),
    Bad("--config-dir FILES/conf model=alist", "model=[1, 2]: choose an option of the group; --help lists them"),
    Bad("--config-dir FILES/conf model=dangling", "model.x=${...}: Interpolation key 'nope' not found"),
    Bad(
        "--config-dir FILES/conf experiment=tab",
        "FILES/conf/experiment/tab.yaml, line 2: found character '\\t' that cannot start any token",
    ),
    Bad(
        "--config-dir FILES/conf experiment=misspelt",
        "experiment/misspelt: epoch: no such key; did you mean epochs?; to add a key that is not in the config write +epoch=...",
    ),
    Bad(
        "--config-dir FILES/conf experiment=kind",
        "experiment/kind: epochs=three: give an integer of at least 1; write it as a plain number, not as the text 'three'",
    ),
    Bad(
        "--config-dir FILES/conf experiment=option",
        "experiment/option: Merge error: str is not a subclass of PrecisionConfig. value: fp32; a file chooses an option in its defaults list, - override /GROUP: OPTION",
    ),
    Bad("--config-dir FILES/conf experiment=group", "model=mlp: choose an option of the group; --help lists them"),
    Bad("--config-dir FILES/conf experiment=default", "re:model=nope: no such option; known here: .*cnn.*"),
]

VALUE = [
    Bad("batch_size=0", f"batch_size=0: {POSITIVE}, or max"),
    Bad("batch_size=null", f"batch_size=null: {POSITIVE}, or max"),
    Bad(
        "batch_size=2**15", f"batch_size=2**15: {POSITIVE}, or max; write it as a plain number, not as the text '2**15'"
    ),
    Bad("batch_size=all", f"batch_size=all: {POSITIVE}, or max; write it as a plain number, not as the text 'all'"),
    Bad("batch_size=???", "batch_size=???: give a value"),
    Bad("batch_size=${epoch}", "batch_size=${...}: Interpolation key 'epoch' not found"),
    Bad("batch_size=${seed} seed=${batch_size}", "batch_size=${...}: Recursive interpolation detected"),
    Bad("epochs=1.5", f"epochs=1.5: {POSITIVE}"),
    Bad("epochs=[1]", f"epochs=[1]: {POSITIVE}"),
    Bad("seed=-1", "seed=-1: give an integer from 0 to 4294967295"),
    Bad("log_every_batches=-1", "log_every_batches=-1: give an integer of at least 0"),
    Bad("objective=null", "objective=null: give a name"),
    Bad("precision.policy=float16", "precision.policy=float16: choose one of float32, mixed_float16, mixed_bfloat16"),
    Bad(
        "precision.policy=mixed_float16",
        "precision.policy=mixed_float16: precision=fp32 means policy=float32; choose another option of the group, or a precision.name of your own",
    ),
    Bad(
        "precision.tf32=true",
        "precision.tf32=true: precision=fp32 means tf32=false; choose another option of the group, or a precision.name of your own",
    ),
    Bad(
        "precision.pinned=head",
        "precision.pinned=head: give a list of regular expressions on layer paths, such as [head]",
    ),
    Bad(
        "precision.pinned=['(']",
        "precision.pinned=[(]: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
    ),
    Bad(
        "loss_scale=dynamic",
        "loss_scale=dynamic: scaling has no purpose with precision=fp32; use loss_scale=auto, or loss_scale.force=true if it is meant",
    ),
    Bad(
        "loss_scale=fixed",
        "loss_scale=fixed: scaling has no purpose with precision=fp32; use loss_scale=auto, or loss_scale.force=true if it is meant",
    ),
    Bad(
        "loss_scale=fixed precision=mixed_float16",
        "loss_scale.value=null: loss_scale=fixed needs one, such as loss_scale.value=1024",
    ),
    Bad("loss_scale.value=1024", "loss_scale.value=1024.0: goes with loss_scale=fixed, not with loss_scale=auto"),
    Bad("loss_scale.growth_interval=-5", f"loss_scale.growth_interval=-5: {POSITIVE}"),
    Bad("loss_scale.growth_factor=-2", "loss_scale.growth_factor=-2.0: give a number above 1"),
    Bad("loss_scale.growth_factor=null", "loss_scale.growth_factor=null: give a number above 1"),
    Bad("loss_scale.backoff_factor=1", "loss_scale.backoff_factor=1.0: give a number above 0 and below 1"),
    Bad("loss_scale.initial=0.5", "loss_scale.initial=0.5: give a number from minimum=1 to maximum=4294967296"),
    Bad("loss_scale.minimum=8 loss_scale.maximum=4", "loss_scale.minimum=8.0: give a number up to maximum=4"),
    Bad("loss_scale.maximum=inf", "loss_scale.maximum=inf: give a finite number"),
    Bad("loss_scale.force=maybe", "loss_scale.force=maybe: choose one of true, false"),
    Bad("memory.mode=leen", "memory.mode=leen: choose one of auto, stock, lean, recompute"),
    Bad(
        "memory.recompute=block",
        "memory.recompute=block: goes with memory=recompute, not with memory=auto",
    ),
    Bad(
        "memory=recompute memory.recompute=null",
        "memory.recompute=null: memory=recompute needs to know where, such as block",
    ),
    Bad(
        "memory=recompute memory.recompute=0",
        "memory.recompute=0: give block, a positive integer k for every k-th block, or a list of regular expressions on layer paths",
    ),
    Bad(
        "memory=recompute memory.recompute=['(']",
        "memory.recompute=[(]: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
    ),
    Bad("memory.limit=lots", "memory.limit=lots: give a number with a unit, such as 12GB, 800MiB or 1.5GiB"),
    Bad(
        "optimizer.learning_rate='1e-3'",
        "optimizer.learning_rate=1e-3: give a number above 0; write it as a plain number, not as the text '1e-3'",
    ),
    Bad("optimizer.learning_rate=1e400", "optimizer.learning_rate=inf: give a finite number"),
    Bad("optimizer.learning_rate=nan", "optimizer.learning_rate=nan: give a finite number"),
    Bad("optimizer.learning_rate=null", "optimizer.learning_rate=null: give a number above 0"),
    Bad("optimizer.learning_rate=[0.1]", "optimizer.learning_rate=[0.1]: give a number above 0"),
    Bad(
        "optimizer.learning_rate={a:1}",
        "optimizer.learning_rate={a: 1}: give a number, or a schedule with its _target_",
    ),
    Bad(
        "optimizer.learning_rate={_target_:a.b} schedule=cosine",
        "optimizer.learning_rate={_target_: a.b}: this is a schedule of its own; it goes with schedule=constant",
    ),
    Bad(
        "optimizer.clipnorm=1 optimizer.clipvalue=1", "optimizer.clipvalue=1.0: give only one of clipnorm and clipvalue"
    ),
    Bad("optimizer.clipnorm={a:1}", "optimizer.clipnorm={a: 1}: give a number above 0 or null"),
    Bad(
        "optimizer.gradient_accumulation_steps=1",
        "optimizer.gradient_accumulation_steps=1: give an integer of at least 2 or null",
    ),
    Bad("optimizer.use_ema=maybe", "optimizer.use_ema=maybe: choose one of true, false"),
    Bad(
        "+optimizer.loss_scale_factor=128",
        "optimizer.loss_scale_factor=128: use loss_scale=fixed loss_scale.value=128, which checks for overflow",
    ),
    Bad(
        "optimizer._target_=keras.optimizers.LossScaleOptimizer",
        "optimizer._target_=keras.optimizers.LossScaleOptimizer: name the inner optimizer; loss scaling comes from the group loss_scale",
    ),
    Bad("optimizer=custom", f"optimizer._target_=???: {TARGET}"),
    Bad("model=custom", f"model._target_=???: {TARGET}"),
    Bad("dataset=custom", f"dataset._target_=null: {TARGET}"),
    Bad("schedule._target_=3", f"schedule._target_=3: {TARGET}"),
    Bad("schedule=cosine schedule.warmup_steps=-1", "schedule.warmup_steps=-1: give an integer of at least 0"),
    Bad(
        "schedule=cosine schedule.alpha=high",
        "schedule.alpha=high: give a number of at least 0; write it as a plain number, not as the text 'high'",
    ),
    Bad("+callbacks.mine=3", "callbacks.mine=3: name a Keras callback by its _target_"),
    Bad(
        "callbacks=early_stopping callbacks.early_stopping.patience=x",
        "callbacks.early_stopping.patience=x: give an integer of at least 0; write it as a plain number, not as the text 'x'",
    ),
    Bad("compile=null", "compile=null: null is not possible here"),
    Bad("compile.jit_compile=yes", "compile.jit_compile=yes: choose one of auto, true, false"),
    Bad("compile.jit_compile=maybe", "compile.jit_compile=maybe: choose one of auto, true, false"),
    Bad("compile.steps_per_execution=0", f"compile.steps_per_execution=0: {POSITIVE}"),
    Bad("compile.loss=3", "compile.loss=3: name a Keras loss, such as mse, or give its _target_"),
    Bad("dataset.validation_fraction=1", f"dataset.validation_fraction=1.0: {UNIT}"),
    Bad("dataset.classes=1", "dataset.classes=1: give an integer of at least 2 or null"),
    Bad("model.dropout=1", f"model.dropout=1.0: {UNIT}"),
    Bad("tracking.kind=nowhere", "tracking.kind=nowhere: choose one of local, server, off"),
    Bad("tracking.experiment=''", "tracking.experiment='': give a name"),
    Bad("tracking.tags=3", "tracking.tags=3: give a mapping of names to values"),
]

STORE = [
    Bad(
        "tracking=server",
        "tracking.uri=null: tracking=server needs the address of an MLflow server: give http(s)://<server>, or choose tracking=local",
    ),
    Bad(
        "tracking.uri=file:/tmp/mlruns",
        "tracking.uri=file:/tmp/mlruns: runs cannot be kept there (MLflow has given up file stores): give sqlite:///<file> or http(s)://<server>",
    ),
    Bad("tracking=server tracking.uri=CLOSED", "re:the MLflow store CLOSED cannot be used: .*Connection refused.*"),
    Bad(
        "tracking.uri=sqlite:///FILES/good.npz",
        "re:the MLflow store sqlite:///FILES/good.npz cannot be used: .*file is not a database.*",
    ),
]

RUN = [
    Bad("batch_size=100000", "batch_size=100000: there are only 1293 training samples", True),
    Bad(
        "objective=test/accurcy",
        "objective=test/accurcy: this run has no such metric; did you mean test/accuracy or train/accuracy?",
        True,
    ),
    Bad(
        "objective=speed",
        "objective=speed: this run has no such metric; choose train/loss, train/accuracy, val/loss, val/accuracy, test/loss, test/accuracy, or a measurement such as time/step_ms",
        True,
    ),
    Bad("precision.pinned=[conv]", "re:precision.pinned: 'conv' matches no layer; the first paths are .*", True),
    Bad(
        "schedule=cosine schedule.warmup_steps=1000",
        "schedule.warmup_steps=1000: the run has only 63 batches",
        True,
    ),
    Bad(
        "schedule._target_=keras.optimizers.schedules.Nope",
        "re:schedule._target_=keras.optimizers.schedules.Nope: cannot be imported: .*; " + TARGET,
        True,
    ),
    Bad(
        "schedule._target_=users_mistakes.nothing",
        "schedule._target_=users_mistakes.nothing: gives a NoneType, not a Keras schedule",
        True,
    ),
    Bad(
        "optimizer=custom optimizer._target_=nowhere.Lion",
        "optimizer._target_=nowhere.Lion: cannot be imported: No module named 'nowhere'; " + TARGET,
        True,
    ),
    Bad(
        "optimizer._target_=builtins.dict",
        "optimizer._target_=builtins.dict: gives a dict, not a Keras optimizer",
        True,
    ),
    Bad(
        "+optimizer.lerning_rate=1",
        "re:optimizer._target_=keras.optimizers.Adam: Argument\\(s\\) not recognized: .*lerning_rate.*",
        True,
    ),
    Bad(
        "+callbacks.mine._target_=keras.callbacks.Nope",
        "re:callbacks.mine._target_=keras.callbacks.Nope: cannot be imported: .*; " + TARGET,
        True,
    ),
    Bad(
        "+callbacks.mine._target_=builtins.dict",
        "callbacks.mine._target_=builtins.dict: gives a dict, not a Keras callback",
        True,
    ),
    Bad(
        "compile.loss=nonsense",
        "compile.loss=nonsense: no such name in Keras; write it as in keras.losses or keras.metrics, or give its _target_",
        True,
    ),
    Bad(
        "compile.loss={_target_:keras.losses.Nope}",
        "re:compile.loss._target_=keras.losses.Nope: cannot be imported: .*",
        True,
    ),
    Bad("compile.loss=mse", f"re:compile.loss=mse: {FITS}: .*\\[2\\].*\\[2,10\\].*", True),
    Bad(
        "compile.metrics=[nonsense]",
        "compile.metrics=nonsense: no such name in Keras; write it as in keras.losses or keras.metrics, or give its _target_",
        True,
    ),
    Bad("compile.metrics=[AUC]", f"re:compile.metrics=\\[AUC\\]: {FITS}: .*", True),
    Bad(
        "model._target_=nowhere.model",
        "re:model._target_=nowhere.model: cannot be imported: No module named 'nowhere'; .*PYTHONPATH, or be where you type the command\\)",
        True,
    ),
    Bad(
        "model._target_=mp_hydra.models.nope",
        "re:model._target_=mp_hydra.models.nope: cannot be imported: .*; give the dotted path .*",
        True,
    ),
    Bad(
        "model=custom model._target_=users_mistakes.nothing",
        "model._target_=users_mistakes.nothing: it must return a keras.Model, but None came back",
        True,
    ),
    Bad(
        "model=mlp +model.width=3",
        "re:model.width=3: mp_hydra.models.mlp takes no such argument; did you mean widths\\?",
        True,
    ),
    Bad(
        "model=transformer",
        "re:model._target_=mp_hydra.models.transformer needs vocabulary, which this dataset does not have.*",
        True,
    ),
    Bad(
        "model=cnn dataset=synthetic dataset.kind=vector",
        "re:model=cnn needs images of shape \\(height, width, channels\\), but the inputs have shape \\(64,\\).*",
        True,
    ),
    Bad(
        "model=custom model._target_=users_mistakes.three_outputs",
        "the model gives 3 outputs for 10 classes; give it one logit for each class, or set compile.loss to the loss that fits",
        True,
    ),
]

DATA = [
    Bad("dataset._target_=nowhere.data", "re:dataset._target_=nowhere.data: there is no such thing; .*", True),
    Bad(
        "dataset=custom dataset._target_=users_mistakes.number",
        "dataset custom: the builder returned a int; return ((x_train, y_train), (x_test, y_test)), a mapping with x_train, y_train, x_test, y_test, or tf.data sets of single samples as (train, test)",
        True,
    ),
    Bad(
        "dataset=custom dataset._target_=users_mistakes.fails",
        "dataset custom: users_mistakes.fails failed with RuntimeError: no disk",
        True,
    ),
    Bad("dataset=synthetic dataset.kind=sound", "dataset.kind=sound: give one of image, vector, tokens", True),
    Bad(
        "dataset=synthetic dataset.shape=[32]",
        "dataset.shape=[32]: kind=image takes [height, width, channels], integers of at least 1, or null",
        True,
    ),
    Bad("dataset.scale=0", "dataset.scale=0: give a finite number other than 0, or null for automatic", True),
    Bad(
        "dataset.image_size=big",
        "dataset.image_size=big: give one integer of at least 1, [height, width], or null",
        True,
    ),
    Bad(
        "dataset=npz", "dataset.path=null: give the path of an .npz file with x_train, y_train, x_test and y_test", True
    ),
    Bad("dataset=npz dataset.path=FILES/none.npz", "dataset npz: there is no file FILES/none.npz", True),
    Bad(
        "dataset=npz dataset.path=FILES/text.npz",
        "dataset npz: FILES/text.npz cannot be read: it is no .npz file, or a damaged one",
        True,
    ),
    Bad(
        "dataset=npz dataset.path=FILES/pickled.npz",
        "dataset npz: x_train in FILES/pickled.npz holds pickled objects; save plain numeric arrays",
        True,
    ),
    Bad(
        "dataset=npz dataset.path=FILES/lacking.npz",
        "dataset npz: FILES/lacking.npz has no x_test, y_test; it holds x_train, y_train",
        True,
    ),
    Bad(
        "dataset=npz dataset.path=FILES/nan.npz",
        "re:dataset npz: x_train has 1 of 180 values that are not finite.*",
        True,
    ),
    Bad(
        "dataset=npz dataset.path=FILES/label.npz dataset.classes=3",
        "re:dataset npz: y_test holds the label 7; with 3 classes the largest is 2.*",
        True,
    ),
    Bad(
        "dataset=npz dataset.path=FILES/lengths.npz",
        "re:dataset npz: x_train has 60 samples but y_train has 59.*",
        True,
    ),
    Bad("dataset=npz dataset.path=FILES/empty.npz", "re:dataset npz: x_test is empty \\(shape \\(0, 3\\)\\).*", True),
    Bad(
        "dataset=npz dataset.path=FILES/large.npz precision=mixed_float16 batch_size=8",
        "re:dataset npz: inputs reach 100000, which float16 \\(largest 65504\\) turns into inf; give dataset.scale, such as dataset.scale=1.0e-05",
        True,
    ),
    Bad("dataset=image_directory dataset.path=FILES/none", "dataset image_directory: FILES/none is no directory", True),
    Bad(
        "dataset=image_directory dataset.path=FILES/images dataset.channels=1",
        "re:dataset image_directory: .*FILES/images/b/5.png.*",
        True,
    ),
]


def save(path: Path, **changes: Any) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.normal(size=(60, 3)).astype("float32"),
        "y_train": np.arange(60) % 3,
        "x_test": generator.normal(size=(30, 3)).astype("float32"),
        "y_test": np.arange(30) % 3,
    }
    np.savez(path, **{key: value for key, value in {**arrays, **changes}.items() if value is not None})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows call FILES."""
    root = tmp_path_factory.mktemp("files").resolve()
    x, y = np.ones((60, 3), "float32"), np.arange(30) % 3
    save(root / "good.npz")
    save(root / "pickled.npz", x_train=np.array([{}] * 60))
    save(root / "lacking.npz", x_test=None, y_test=None)
    save(root / "nan.npz", x_train=np.where(np.arange(180).reshape(60, 3) == 5, np.nan, x))
    save(root / "label.npz", y_test=np.where(np.arange(30) == 4, 7, y))
    save(root / "lengths.npz", y_train=np.arange(59) % 3)
    save(root / "empty.npz", x_test=x[:0], y_test=y[:0])
    save(root / "large.npz", x_train=x * 1e5)
    (root / "text.npz").write_text("hello")
    write_images(root / "images")
    write_config_files(root / "conf")
    (root / "users_mistakes.py").write_text(
        textwrap.dedent("""
        import keras

        def nothing(**_):
            return None

        def number():
            return 3

        def fails():
            raise RuntimeError("no disk")

        def three_outputs():
            return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])
        """)
    )
    return root


def write_images(root: Path) -> None:
    from PIL import Image

    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (8, 8), color=number).save(root / name / f"{number}.png")
    broken = root / "b" / "5.png"
    broken.write_bytes(broken.read_bytes()[:40])


def write_config_files(root: Path) -> None:
    (root / "model").mkdir(parents=True)
    (root / "experiment").mkdir()
    (root / "model/latin.yaml").write_bytes(b"x: caf\xe9\n")
    head = "# @package _global_\n"
    for name, text in {
        "model/broken": "a: [1\nb: 2\n",
        "model/twice": "a: 1\na: 2\n",
        "model/unclosed": "x: ${a\n",
        "model/alist": "- 1\n- 2\n",
        "model/dangling": "_target_: a.b\nx: ${nope}\n",
        "experiment/tab": f"{head}\tx: 1\n",
        "experiment/misspelt": f"{head}epoch: 3\n",
        "experiment/kind": f"{head}epochs: three\n",
        "experiment/option": f"{head}precision: fp32\n",
        "experiment/group": f"{head}model: mlp\n",
        "experiment/default": f"{head}defaults:\n  - override /model: nope\n",
    }.items():
        (root / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def places(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the words in capitals stand for."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    return {"FILES": str(files), "CLOSED": closed, "STORE": store}


@dataclass(frozen=True)
class Shown:
    """What a command left: its exit status, and what it wrote to file descriptors 1 and 2."""

    status: object
    out: str
    err: str


@pytest.fixture
def typed(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[list[str]], Shown]]:
    """Runs `main` on arguments, in a directory of its own, with an MLflow client that gives up soon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(places["FILES"])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(arguments: list[str]) -> Shown:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        return Shown(ended.value.code, *capfd.readouterr())

    yield run
    # Hydra gives the root logger handlers on streams that pytest closes after the test.
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def statuses(store: str) -> list[str]:
    """The status of every run in the store, the latest first."""
    from mp_hydra.tracking.store import open_client

    client = open_client(store)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [run.info.status for run in client.search_runs(experiments, order_by=["attributes.start_time DESC"])]


@pytest.mark.parametrize("row", [*COMMAND, *CONFIG_FILE, *VALUE, *STORE, *RUN, *DATA], ids=lambda row: row.line)
def test_bad_input_gets_one_line_and_leaves_no_run_open(
    row: Bad, places: dict[str, str], typed: Callable[[list[str]], Shown]
) -> None:
    line, answer = row.line, row.answer
    if "tracking.uri=" not in line and "tracking=" not in line:
        line += " tracking.uri=STORE"
    for word, place in places.items():
        line, answer = line.replace(word, place), answer.replace(word, place)
    before = statuses(places["STORE"])

    shown = typed(line.split(" "))

    assert "Traceback" not in shown.out + shown.err
    assert shown.err.startswith("mp_hydra: ")
    assert shown.err.endswith("\n")
    assert shown.err.count("\n") == 1
    said = shown.err.removeprefix("mp_hydra: ").rstrip("\n")
    if answer.startswith("re:"):
        assert re.fullmatch(answer.removeprefix("re:"), said)
    else:
        assert said == answer
    assert shown.status == 1
    after = statuses(places["STORE"])
    assert "RUNNING" not in after
    assert after == [*(["FAILED"] if row.recorded else []), *before]
