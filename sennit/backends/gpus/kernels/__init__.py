"""Parts of kernels, in Triton's language, which Gluon's kernels call too."""
