#include "host/expressions.h"

#include "host/errors.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>

namespace flint::host {

namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;

enum class Kind : uint8_t { kCONSTANT, kUNKNOWN, kOPERATION };

/// TensorRT's expression classes hold a pointer to their implementation; here both are one object.
class Expression final : public IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
  public:
    Expression(size_t index, Kind kind, int64_t value, DimensionOperation op = {}, size_t a = 0, size_t b = 0)
        : index(index), kind(kind), value(value), op(op), a(a), b(b) {
        mImpl = this;
    }

    size_t const index;
    Kind const kind;
    /// Of a constant; of an unknown its number.
    int64_t const value;
    DimensionOperation const op;
    /// Operands, by index.
    size_t const a;
    size_t const b;

  private:
    bool isConstant() const override { return kind == Kind::kCONSTANT; }
    int64_t getConstantValue() const override {
        return kind == Kind::kCONSTANT ? value : std::numeric_limits<int64_t>::min();
    }
    bool isSizeTensor() const override { return false; }
};

Expression const& ours(IDimensionExpr const& expression) {
    return static_cast<Expression const&>(expression);
}

/// The operation's value, or nothing for an overflow, a division by 0 or an unknown operation.
std::optional<int64_t> apply(DimensionOperation op, int64_t a, int64_t b) {
    int64_t result = 0;
    switch (op) {
    case DimensionOperation::kSUM:
        return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case DimensionOperation::kPROD:
        return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case DimensionOperation::kSUB:
        return __builtin_sub_overflow(a, b, &result) ? std::nullopt : std::optional(result);
    case DimensionOperation::kMAX:
        return std::max(a, b);
    case DimensionOperation::kMIN:
        return std::min(a, b);
    case DimensionOperation::kEQUAL:
        return a == b;
    case DimensionOperation::kLESS:
        return a < b;
    case DimensionOperation::kFLOOR_DIV:
    case DimensionOperation::kCEIL_DIV:
        // Dimensions are not negative, so truncation is the floor.
        if (b <= 0 || a < 0) {
            return std::nullopt;
        }
        return a / b + (op == DimensionOperation::kCEIL_DIV && a % b != 0);
    }
    return std::nullopt;
}

} // namespace

class Expressions::Impl final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
  public:
    Impl() { nvinfer1::IExprBuilder::mImpl = this; }

    IDimensionExpr const* add(Kind kind, int64_t value, DimensionOperation op = {}, size_t a = 0, size_t b = 0) {
        return &expressions.emplace_back(expressions.size(), kind, value, op, a, b);
    }

    /// In a deque, so that addresses last.
    std::deque<Expression> expressions;
    int64_t unknowns = 0;

  private:
    IDimensionExpr const* constant(int64_t value) override { return add(Kind::kCONSTANT, value); }

    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                    IDimensionExpr const& second) override {
        if (first.isConstant() && second.isConstant()) {
            auto const value = apply(op, first.getConstantValue(), second.getConstantValue());
            return value ? constant(*value) : nullptr; // The plugin reports a refused expression.
        }
        return add(Kind::kOPERATION, 0, op, ours(first).index, ours(second).index);
    }

    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override {
        return nullptr; // None of our ops has outputs whose shape depends on data.
    }
};

Expressions::Expressions() : mImpl(std::make_unique<Impl>()) {}
Expressions::~Expressions() = default;

IDimensionExpr const* Expressions::unknown() {
    return mImpl->add(Kind::kUNKNOWN, mImpl->unknowns++);
}

IDimensionExpr const* Expressions::constant(int64_t value) {
    return mImpl->add(Kind::kCONSTANT, value);
}

nvinfer1::IExprBuilder& Expressions::builder() {
    return *mImpl;
}

std::vector<int64_t> Expressions::evaluate(std::span<int64_t const> unknowns) const {
    if (static_cast<int64_t>(unknowns.size()) != mImpl->unknowns) {
        throw HostError("expected " + std::to_string(mImpl->unknowns) + " dynamic dimensions, found " +
                        std::to_string(unknowns.size()));
    }
    std::vector<int64_t> values;
    values.reserve(mImpl->expressions.size());
    for (Expression const& e : mImpl->expressions) {
        if (e.kind == Kind::kCONSTANT) {
            values.push_back(e.value);
        } else if (e.kind == Kind::kUNKNOWN) {
            values.push_back(unknowns[e.value]);
        } else if (auto const value = apply(e.op, values[e.a], values[e.b])) {
            values.push_back(*value);
        } else {
            throw HostError("shape arithmetic fails on " + std::to_string(values[e.a]) + " and " +
                            std::to_string(values[e.b]));
        }
    }
    return values;
}

int64_t Expressions::valueOf(IDimensionExpr const* expression, std::vector<int64_t> const& values) {
    return values[ours(*expression).index];
}

} // namespace flint::host
