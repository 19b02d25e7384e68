"""What the tests here compile with; it lives with the kernels, as the predictions of batchgen.bench compile too."""

import sys

from batchgen_kernels import cross_compile

sys.modules[__name__] = cross_compile
