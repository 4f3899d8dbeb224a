"""Matrix products, in fp32 whatever the operands are, as the tensor cores accumulate."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.te.standin import quantize
from tests.te.standin.enums import DType, torch_type


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """fp32; cuBLAS counts columns first, so of tensors in torch's order it is op(b) @ op(a)."""
    a = quantize.operand(a, columnwise=not transa).float()
    b = quantize.operand(b, columnwise=transb).float()
    rows = b.reshape(-1, b.shape[-1])
    columns = a.reshape(-1, a.shape[-1])
    product = (rows.T if transb else rows) @ (columns.T if transa else columns)
    return product if transb else product.view(*b.shape[:-1], product.shape[-1])


def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: quantize.Quantizer | None,
    output_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """alpha op(B) op(A) [+ beta D] [+ bias], the bias's gradient where `grad`, and two that are not made here."""
    if gelu or comm_overlap is not None:
        raise NotImplementedError("GELU in a matrix product and overlapped communication need the compiled part")
    product = alpha * _product(A, transA, B, transB)
    bias_grad = None
    if bias is not None and grad:
        of = quantize.operand(B, columnwise=transB).float()
        bias_grad = of.reshape(-1, of.shape[-1]).sum(0).to(torch_type(bias_type))
    elif bias is not None and bias.numel():
        product = product + bias.float()
    if D is not None and accumulate:
        product = product + (1.0 if beta is None else beta) * D.float()
    dtype = torch_type(output_dtype) if output_dtype is not None else A.dtype
    if quantizer is not None:
        return quantize.quantize(product.to(dtype), quantizer, D), bias_grad, None, None
    if D is None:
        return product.to(dtype), bias_grad, None, None
    return D.copy_(product), bias_grad, None, None


def te_general_grouped_gemm(
    A: Sequence[Tensor],
    transa: bool,
    B: Sequence[Tensor],
    transb: bool,
    D: Sequence[Tensor],
    D_type: DType,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_type: DType,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """One product for each pair; with `single_output` they lie one after the other in `D[0]`."""
    products = [_product(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    outs = D[0].split([len(product) for product in products]) if single_output else D
    for out, product, b, own in zip(outs, products, B, bias, strict=True):
        if own.numel() and grad:
            own.copy_(quantize.operand(b, columnwise=transb).float().sum(0))
        elif own.numel():
            product = product + own.float()
        out.copy_(out.float() + product if accumulate else product)
    return bias
