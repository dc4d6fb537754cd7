// Shape arithmetic: the IExprBuilder that plugins describe their outputs' shapes with, and its evaluation.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace flint::host {

/// Owns every expression of a graph. They are numbered as they are made, so each stands behind its operands, and one
/// pass over them gives the values of all.
class Expressions {
  public:
    Expressions();
    ~Expressions();
    Expressions(Expressions const&) = delete;
    Expressions& operator=(Expressions const&) = delete;

    /// A new unknown: one dynamic dimension of a graph input.
    nvinfer1::IDimensionExpr const* unknown();
    nvinfer1::IDimensionExpr const* constant(int64_t value);
    nvinfer1::IExprBuilder& builder();

    /// Values of all expressions, for values of the unknowns in the order in which they were made. Throws HostError for
    /// an overflow or a division by 0.
    std::vector<int64_t> evaluate(std::span<int64_t const> unknowns) const;
    /// One of `evaluate`'s values.
    static int64_t valueOf(nvinfer1::IDimensionExpr const* expression, std::vector<int64_t> const& values);

  private:
    class Impl;
    std::unique_ptr<Impl> mImpl;
};

} // namespace flint::host
