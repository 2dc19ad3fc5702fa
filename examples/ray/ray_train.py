"""Ray Train: two workers train one network. On a cluster, Ray places them on any of its machines.

pip install 'deat[ray]' 'ray[train]'
python examples/ray/ray_train.py
"""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import deat


def train(settings: dict[str, Any]) -> None:
    """What each worker runs. Ray has connected the workers, and deat uses the connection."""
    result = deat.fit(
        deat.build_model("small", in_channels=1, image_size=8),
        deat.load_data("digits"),
        method="m+deat",
        epochs=settings["epochs"],
        val=0.1,
        device="cpu",
        distributed=deat.Distributed.initialize("cpu"),
        checkpoints=settings["checkpoints"],  # workers that Ray starts again resume from here
        progress=False,
    )
    last = result.history[-1]
    ray.train.report({"k": last.k, "robust": last.val_robust, "backprops": last.backprops})


def main(folder: Path) -> None:
    checkpoints = folder / "checkpoints"  # on a cluster: a folder that all machines share
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": 3, "checkpoints": str(checkpoints)},
        torch_config=TorchConfig(backend="gloo"),  # on GPUs: "nccl", and use_gpu=True in the next line
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="digits", storage_path=str(folder / "ray")),
    )
    trainer.fit()
    run = deat.load_run(checkpoints, model=deat.build_model("small", in_channels=1, image_size=8), epoch="last")
    for epoch in run.history:
        print(f"epoch {epoch.epoch + 1}: k {epoch.k}, l_X {epoch.magnitude:.6g}, backprops {epoch.backprops}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs").resolve())
