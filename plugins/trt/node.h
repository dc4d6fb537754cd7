// One node of the graph: an op with its field values, and what follows from them. No TensorRT here.
#pragma once

#include "ops_schema.h"

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace flint {

/// A node's fields, types or shapes contradict its op's schema.
struct SchemaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Shape = std::vector<int64_t>;

/// "bf16 or f32".
std::string dtypeNames(DTypeMask mask);
/// "[8, 1024]".
std::string shapeText(Shape const& shape);

/// What one dimension of one input is for: to find a symbol, or to be compared.
struct Step {
    int input;
    int axis;
    /// The symbol found, or kNO_SYMBOL.
    Symbol binds;
};

class Node {
  public:
    /// `fields` in the order of `op.fields`, of the right types. Throws SchemaError for a value that is no choice.
    Node(Op const& op, std::vector<FieldValue> fields);

    Op const& op() const { return *mOp; }
    std::vector<FieldValue> const& fields() const { return mFields; }
    std::vector<Binding const*> const& inputs() const { return mInputs; }
    std::vector<Binding const*> const& outputs() const { return mOutputs; }
    /// Per output the input whose memory it shares, or -1.
    std::vector<int> const& aliases() const { return mAliases; }
    /// The inputs' dimensions in an order in which each holds at most one symbol that is not yet known.
    std::vector<Step> const& steps() const { return mSteps; }
    /// The symbols that fields fix.
    Symbols const& fieldSymbols() const { return mFieldSymbols; }

    int32_t intField(std::string_view name) const { return std::get<int32_t>(field(name)); }
    float floatField(std::string_view name) const { return std::get<float>(field(name)); }
    std::string const& strField(std::string_view name) const { return std::get<std::string>(field(name)); }

    /// Index of a binding, or -1 where this node does not have it.
    int inputIndex(std::string_view name) const;
    int outputIndex(std::string_view name) const;

    /// Throws SchemaError naming the binding, what was expected and what was found.
    void checkCounts(int inputs, int outputs) const;
    void checkInputType(int input, DTypeMask found, std::string const& foundName) const;
    void checkInputRank(int input, int found) const;

    /// Check concrete input shapes and return the symbols; mirrors `Op.solve` in ops.py, and throws like checkCounts.
    Symbols solve(std::span<Shape const> inputs) const;
    /// Throws SchemaError unless each output has the shape that the symbols give.
    void checkOutputs(std::span<Shape const> outputs, Symbols const& symbols) const;

  private:
    FieldValue const& field(std::string_view name) const;
    bool present(Binding const& binding) const;
    void planSteps();

    Op const* mOp;
    std::vector<FieldValue> mFields;
    std::vector<Binding const*> mInputs;
    std::vector<Binding const*> mOutputs;
    std::vector<int> mAliases;
    std::vector<Step> mSteps;
    Symbols mFieldSymbols;
};

} // namespace flint
