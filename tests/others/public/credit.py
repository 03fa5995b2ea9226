"""CREDIT of NCAR: weather models whose latitudes are sharded, its tests on several ranks, and a training."""

from others.public.program import Program

# The wheels of torchvision from PyPI are for GPUs, and segmentation_models_pytorch needs it.
FILES = {
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": """class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x
""",
    "segmentation_models_pytorch.py": "Unet = UnetPlusPlus = MAnet = Linknet = FPN = PSPNet = PAN = DeepLabV3 = "
    "DeepLabV3Plus = None\n",
}
PACKAGES = (
    *("xarray", "einops", "cftime", "netcdf4", "zarr", "obstore", "optuna", "haversine", "pandas"),
    *("scikit-learn", "numba", "bridgescaler", "torch-harmonics<0.9"),
)
MADE = '''"""Make fields like those of ERA5: waves that move east, on a small grid."""

import numpy as np
import xarray as xr

rng = np.random.default_rng(0)
times = np.datetime64("2015-01-01", "ns") + np.arange(120) * np.timedelta64(6, "h")
lat, lon, level = np.linspace(87, -87, 64), np.arange(64) * 360 / 64, [10, 60, 120]
phase = np.radians(lon)[None, None, :] - 0.1 * np.arange(len(times))[:, None, None]


def field(*shape):
    wave = np.sin(rng.integers(1, 4) * phase + rng.random()) * np.cos(np.radians(lat))[:, None]
    wave = wave[:, None] if len(shape) == 1 else wave
    return (wave + 0.1 * rng.standard_normal((len(times), *shape, 64, 64))).astype("float32")


deep, flat = ("time", "level", "latitude", "longitude"), ("time", "latitude", "longitude")
fields = {name: (deep, field(3)) for name in ("U", "V", "T", "Q")}
fields |= {name: (flat, field()) for name in ("SP", "t2m", "tsi")}
coords = {"time": times, "level": level, "latitude": lat, "longitude": lon}
xr.Dataset(fields, coords).to_netcdf("made/era5_2015.nc")
height = rng.standard_normal((64, 64)).astype("float32")
static = {"Z_GDS4_SFC": (flat[1:], height), "LSM": (flat[1:], (height > 0).astype("float32"))}
xr.Dataset(static, {"latitude": lat, "longitude": lon}).to_netcdf("made/static.nc")
'''
TRAINING = """save_loc: made/run
seed: 1000
data:
  source:
    ERA5:
      dataset_type: local
      level_coord: level
      levels: [10, 60, 120]
      variables:
        prognostic: {vars_3D: [U, V, T, Q], vars_2D: [SP, t2m], path: made/era5_%Y.nc}
        dynamic_forcing: {vars_2D: [tsi], path: made/era5_%Y.nc}
        static: {vars_2D: [Z_GDS4_SFC, LSM], path: made/static.nc}
        diagnostic: null
  timestep: 6h
  history_len: 1
  forecast_len: 2
  start_datetime: '2015-01-01'
  end_datetime: '2015-01-20'
validation_data: {start_datetime: '2015-01-21', end_datetime: '2015-01-29', timestep: 6h, history_len: 1,
  forecast_len: 2}
preblocks: {per_step: {concat: {type: concat}}}
postblocks:
  per_step:
    reconstruct: {type: reconstruct}
    reconstruct_target: {type: reconstruct, args: {in_key: y, out_key: y_target_processed}}
model:
  type: wxformer
  frames: 1
  image_height: 64
  image_width: 64
  levels: 3
  channels: 4
  surface_channels: 2
  input_only_channels: 3
  output_only_channels: 0
  patch_width: 1
  patch_height: 1
  frame_patch_size: 1
  dim: [8, 16, 32, 64]
  dim_head: 8
  depth: [1, 1, 1, 1]
  global_window_size: [4, 4, 2, 1]
  local_window_size: 2
  cross_embed_kernel_sizes: [[4, 8], [2, 4], [2, 4], [2, 4]]
  cross_embed_strides: [2, 2, 2, 2]
  attn_dropout: 0.0
  ff_dropout: 0.0
  use_spectral_norm: true
  interp: false
  padding_conf: {activate: false}
  post_conf: {activate: false}
loss: {training_loss: mse, validation_loss: mse, use_power_loss: false, use_spectral_loss: false,
  use_latitude_weights: false, use_variable_weights: false}
trainer:
  type: era5-gen2
  parallelism: {data: fsdp2, tensor: 1, domain: 2}
  load_weights: false
  load_optimizer: false
  load_scaler: false
  load_scheduler: false
  save_backup_weights: false
  save_best_weights: true
  save_metric_vars: true
  skip_validation: false
  update_learning_rate: false
  learning_rate: 0.001
  weight_decay: 0
  train_batch_size: 1
  valid_batch_size: 1
  ensemble_size: 1
  batches_per_epoch: 10
  valid_batches_per_epoch: 2
  stopping_patience: 50
  start_epoch: 0
  num_epoch: 3
  reload_epoch: false
  epochs: 3
  use_scheduler: false
  amp: false
  grad_accum_every: 1
  grad_max_norm: 1.0
  thread_workers: 0
  valid_thread_workers: 0
"""


def tests_of(script: str, ranks: int) -> Program:
    """Return a script of tests for torchrun, on CPUs."""
    return Program(
        repository="NCAR/miles-credit",
        command=f"{script}.py",
        ranks=ranks,
        prepare=(f"mv tests/{script}.py .",),  # beside the package, which need not be installed then
        files=FILES,
        packages=PACKAGES,
        changes=(  # the tests are for GPUs alone
            (f"tests/{script}.py", "    torch.cuda.set_device(local_rank)\n", ""),
            (f"tests/{script}.py", 'torch.device(f"cuda:{rank}")', 'torch.device("cpu")'),
        ),
        results=r"(?:max diff(?::| =) ([\d.e+-]+)|Results: (\d+) passed, (\d+) failed)",
        compared="passed and failed tests, and the errors that they print",
    )


PROGRAMS = {
    "credit-domain": tests_of("test_domain_parallel_multigpu", 4),
    "credit-transposed": tests_of("test_domain_parallel_conv_transpose3d_multigpu", 2),
    "credit": Program(
        repository="NCAR/miles-credit",
        command="-m credit.applications.train_gen2 -c made/train.yml --backend gloo",
        ranks=4,
        prepare=("python made/make.py",),
        files={**FILES, "made/make.py": MADE, "made/train.yml": TRAINING},
        packages=PACKAGES,
        results=r"Epoch \d+ valid metrics valid_rmse: ([\d.]+) valid_r2score: (-?[\d.]+) valid_bias: (-?[\d.]+)",
        compared="errors of validation of 3 epochs: FSDP2 on 2 pairs of ranks that share the latitudes",
    ),
}
