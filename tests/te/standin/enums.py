"""The enumerations and the classes that Transformer Engine's Python names as it is imported."""

from __future__ import annotations

import enum

import torch


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_type(dtype: int) -> torch.dtype:
    """Of this enumeration or of the one in Transformer Engine's Python; the type of 4 bits has none."""
    return _TORCH[DType(int(dtype))]


class NVTEScalingMode(enum.IntEnum):
    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


class NVTERoutingMapFormat(enum.IntEnum):
    BYTEMAP = 0
    BITMAP_U8 = 1


class NVTEQBHistogramMode(enum.IntEnum):
    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class CommOverlapType(enum.IntEnum):
    RS = 0
    AG = 1


class NVTE_QKV_Format(enum.IntEnum):
    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


_LAYOUTS = (
    *("SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD"),
    *("BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D", "BSHD_BSHD_BSHD"),
    *("T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD"),
    *("SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "THD_BSHD_BSHD", "THD_SBHD_SBHD"),
    *("Paged_KV_BSHD_BSHD_BSHD", "Paged_KV_BSHD_SBHD_SBHD", "Paged_KV_SBHD_BSHD_BSHD", "Paged_KV_SBHD_SBHD_SBHD"),
    *("Paged_KV_THD_BSHD_BSHD", "Paged_KV_THD_SBHD_SBHD", "BHSD_BHSD_BHSD", "QKV_Layout_NOT_SET"),
)
NVTE_QKV_Layout = enum.IntEnum("NVTE_QKV_Layout", [f"NVTE_{name}" for name in _LAYOUTS], start=0)
NVTE_Bias_Type = enum.IntEnum(
    "NVTE_Bias_Type", ["NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"], start=0
)
NVTE_Mask_Type = enum.IntEnum(
    "NVTE_Mask_Type",
    [
        f"NVTE_{name}_MASK"
        for name in ("NO", "PADDING", "CAUSAL", "PADDING_CAUSAL", "CAUSAL_BOTTOM_RIGHT", "PADDING_CAUSAL_BOTTOM_RIGHT")
    ],
    start=0,
)
NVTE_Softmax_Type = enum.IntEnum(
    "NVTE_Softmax_Type", [f"NVTE_{name}_SOFTMAX" for name in ("VANILLA", "OFF_BY_ONE", "LEARNABLE")], start=0
)


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class FP8TensorMeta:
    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


class CommOverlap:
    """Overlapped communication needs NVLink; its types are named in annotations."""


class CommOverlapP2P(CommOverlap):
    pass


class CommOverlapHelper:
    pass
