// The dtypes that kernels know. Plain C: the CUDA part is compiled without torch's headers.
#pragma once

enum layerzero_dtype { LZ_FLOAT32 = 0, LZ_FLOAT16 = 1, LZ_BFLOAT16 = 2, LZ_FLOAT64 = 3 };
