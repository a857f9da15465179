"""The MLflow model: it must open where mp_hydra is not installed, and say what it takes and gives."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.saved_model import save_model

if TYPE_CHECKING:
    from pathlib import Path


class FakeSplit:
    """Test samples as the model receives them."""

    def __init__(self, x: Any) -> None:
        self.x, self.size = x, len(x)

    def batches(self, batch_size: int) -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((self.x, np.zeros(self.size))).batch(batch_size)


class FakeData:
    def __init__(self, x: Any) -> None:
        self.test = FakeSplit(x)


def trained(policy: str = "float32") -> Any:
    import keras

    from mp_hydra.precision import scoped_policy
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    with scoped_policy(policy, tf32=False):
        layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2, dtype="float32")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError(), auto_scale_loss=False)
        model.optimizer = ScaledOptimizer(model.optimizer, mode="dynamic", scale=1024.0)
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
        return model


@pytest.mark.process
def test_model_opens_in_a_process_without_mp_hydra_and_predicts_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    model = trained("mixed_bfloat16")
    save_model(model, FakeData(x), tmp_path / "model")  # type: ignore[arg-type]
    np.savez(tmp_path / "xy.npz", x=x, y=model.predict(x, verbose=0))
    code = textwrap.dedent(
        """
        import sys
        sys.modules["mp_hydra"] = None
        import numpy as np
        import mlflow.pyfunc
        with np.load("xy.npz") as stored:
            np.testing.assert_array_equal(mlflow.pyfunc.load_model("model").predict(stored["x"]), stored["y"])
        print("opened")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.endswith("opened\n"), done.stderr


def test_signature_and_requirements_are_written(tmp_path: Path) -> None:
    import keras
    import mlflow.models
    import tensorflow as tf

    save_model(trained(), FakeData(np.ones((1, 3), "float32")), tmp_path / "model")  # type: ignore[arg-type]
    signature = mlflow.models.get_model_info(str(tmp_path / "model")).signature
    assert signature.inputs.inputs[0].shape == (-1, 3)
    assert signature.outputs.inputs[0].shape == (-1, 2)
    assert signature.outputs.inputs[0].type == np.float32
    required = (tmp_path / "model" / "requirements.txt").read_text(encoding="utf-8")
    assert f"tensorflow=={tf.__version__}" in required
    assert f"keras=={keras.__version__}" in required
    assert "mp_hydra" not in required
