#include "trt/shapes.h"

namespace flint {

namespace {

using Expr = nvinfer1::IDimensionExpr const*;
using Exprs = std::array<Expr, std::tuple_size_v<Symbols>>;

class Algebra {
  public:
    explicit Algebra(nvinfer1::IExprBuilder& builder) : mBuilder(builder) {}

    Expr constant(int64_t value) { return check(mBuilder.constant(value)); }

    Expr times(Expr a, int64_t factor) {
        return factor == 1 ? a : operation(nvinfer1::DimensionOperation::kPROD, a, constant(factor));
    }

    Expr dividedBy(Expr a, int64_t divisor) {
        return divisor == 1 ? a : operation(nvinfer1::DimensionOperation::kFLOOR_DIV, a, constant(divisor));
    }

    /// factor * product of the dimension's symbols, leaving out `without`.
    Expr product(Dim const& dim, Exprs const& symbols, Symbol without = kNO_SYMBOL) {
        Expr value = nullptr;
        for (Symbol symbol : dim.symbols) {
            if (symbol != without) {
                value =
                    value ? operation(nvinfer1::DimensionOperation::kPROD, value, symbols[symbol]) : symbols[symbol];
            }
        }
        return value ? times(value, dim.factor) : constant(dim.factor);
    }

    Expr dividedBy(Expr a, Expr divisor) {
        return divisor->isConstant() ? dividedBy(a, divisor->getConstantValue())
                                     : operation(nvinfer1::DimensionOperation::kFLOOR_DIV, a, divisor);
    }

  private:
    Expr operation(nvinfer1::DimensionOperation op, Expr a, Expr b) { return check(mBuilder.operation(op, *a, *b)); }

    static Expr check(Expr expr) {
        if (!expr) {
            throw SchemaError("TensorRT refused a shape expression");
        }
        return expr;
    }

    nvinfer1::IExprBuilder& mBuilder;
};

} // namespace

void outputShapes(Node const& node, nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                  nvinfer1::IExprBuilder& builder) {
    Algebra algebra(builder);
    Exprs symbols{};
    for (size_t i = 0; i < symbols.size(); ++i) {
        if (node.fieldSymbols()[i] != kUNKNOWN) {
            symbols[i] = algebra.constant(node.fieldSymbols()[i]);
        }
    }
    for (size_t i = 0; i < node.inputs().size(); ++i) {
        node.checkInputRank(static_cast<int>(i), inputs[i].nbDims);
    }
    for (Step const& step : node.steps()) {
        Binding const& binding = *node.inputs()[step.input];
        Dim const& dim = binding.shape[step.axis];
        Expr const found = algebra.times(inputs[step.input].d[step.axis], dim.divisor);
        Expr const known = algebra.product(dim, symbols, step.binds);
        if (step.binds != kNO_SYMBOL) {
            symbols[step.binds] = algebra.dividedBy(found, known);
        } else if (found->isConstant() && known->isConstant() &&
                   found->getConstantValue() != known->getConstantValue()) {
            // What is dynamic yet is compared when shapes are concrete, in configurePlugin and onShapeChange.
            throw SchemaError(std::string("input ") + binding.name + ": dimension " + std::to_string(step.axis) + " (" +
                              dim.text + ") must be " + std::to_string(known->getConstantValue() / dim.divisor) +
                              ", found " + std::to_string(found->getConstantValue() / dim.divisor));
        }
    }
    for (size_t i = 0; i < node.outputs().size(); ++i) {
        int const alias = node.aliases()[i];
        if (alias >= 0) {
            outputs[i] = inputs[alias];
            continue;
        }
        auto const& shape = node.outputs()[i]->shape;
        outputs[i].nbDims = static_cast<int32_t>(shape.size());
        for (size_t axis = 0; axis < shape.size(); ++axis) {
            outputs[i].d[axis] = algebra.dividedBy(algebra.product(shape[axis], symbols), shape[axis].divisor);
        }
    }
}

} // namespace flint
