"""DeePMD-kit: a potential for water, trained on DDP with energies and forces."""

from others.public.program import Program

INPUT = "examples/water/se_e2_a/input_torch.json"
TRAINING = "deepmd/pt/train/training.py"
INSTALLED = "$(python -c \"import sysconfig; print(sysconfig.get_path('purelib'))\")/deepmd"
PROGRAMS = {
    "deepmd-kit": Program(
        repository="deepmodeling/deepmd-kit",
        command=f"-m deepmd --pt train {INPUT} --skip-neighbor-stat",
        packages=("deepmd-kit==3.2.0",),
        prepare=(
            # the package's operators are built for another PyTorch: the checkout's Python does without them
            f"mkdir deepmd/lib && cp {INSTALLED}/lib/*.ini {INSTALLED}/lib/*.py deepmd/lib/",
            f"cp {INSTALLED}/_version.py deepmd/",
            # with its dependencies it would bring a PyTorch of its own
            "pip install -q --no-deps e3nn opt_einsum_fx opt_einsum",
        ),
        changes=(
            # rank 0 alone calls a collective of mpi4py's world, which under torchrun is one process
            ("deepmd/utils/hostlist.py", "MPI.COMM_WORLD", "MPI.COMM_SELF"),
            # its DDP is for GPUs alone
            (TRAINING, "            torch.cuda.set_device(LOCAL_RANK)\n", ""),
            (TRAINING, "device_ids=[LOCAL_RANK],", "device_ids=None,"),
            (TRAINING, "output_device=LOCAL_RANK,", "output_device=None,"),
            # the folder of the run, and a shorter run
            (INPUT, "../data/", "examples/water/data/"),
            (INPUT, '"numb_steps": 100000', '"numb_steps": 20'),
            (INPUT, '"disp_freq": 100', '"disp_freq": 1'),
            (INPUT, '"data_stat_nbatch": 20', '"data_stat_nbatch": 1'),
        ),
        results=r"Batch +(\d+): \w+: rmse = ([\d.e+-]+), rmse_e = ([\d.e+-]+), rmse_f = ([\d.e+-]+)",
        compared="errors of energies and forces of 20 steps, in training and in validation",
    ),
}
