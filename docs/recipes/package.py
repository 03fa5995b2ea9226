# Spack: a file of a repository of your own, as packages/py_axonmpi/package.py (`spack repo create` makes one). Then
#
#     spack install py-axonmpi
#
# `spack checksum py-axonmpi` prints the checksum of the released archive. To install a clone instead:
#
#     spack develop --path PATH_OF_THE_CLONE py-axonmpi@0.1.0
#
# isal is left out: Spack's version is older than axonmpi needs. Without isal, checksums of checkpoints are zlib's.
# Spack does not have tyro: for `axonmpi train`, `top` and `checkpoint` install the extra `train` into a virtual
# environment on top.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyAxonmpi(PythonPackage):
    """Distributed PyTorch training on HPC clusters: MPI starts the ranks and carries the collectives."""

    homepage = "https://pypi.org/project/axonmpi/"
    pypi = "axonmpi/axonmpi-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-mpi4py@4.0:")
        depends_on("py-numpy@1.26:")
        depends_on("py-torch@2.7:")
