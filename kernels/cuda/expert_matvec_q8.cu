// `expert_matmul` with few tokens of eight-bit activations, a kernel for each type of block.
#include "expert_matvec.cuh"

#define EIGHTS(NAME) \
    EXPERT_MATVEC(q8, NAME, Quant<TYPE_##NAME>::BLOCK, Quant<TYPE_##NAME>::BYTES, MatVec<TYPE_##NAME, Eights, 1>)
FOR_BLOCK_TYPES(EIGHTS)
