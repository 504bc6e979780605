// `expert_matmul` with few tokens of floats, a kernel for each type.
#include "expert_matvec.cuh"
#include "matvec_floats.cuh"

#define FLOATS(NAME) \
    EXPERT_MATVEC(f32, NAME, Quant<TYPE_##NAME>::BLOCK, Quant<TYPE_##NAME>::BYTES, MatVec<TYPE_##NAME, Floats, 1>)
#define FLOAT_WEIGHTS(NAME) EXPERT_MATVEC(f32, NAME, 1, (MatVecFloats<TYPE_##NAME, 1>::BYTES), MatVecFloats<TYPE_##NAME, 1>)
FOR_BLOCK_TYPES(FLOATS)
FOR_FLOAT_TYPES(FLOAT_WEIGHTS)
