// The op schemas in C++: the types of the tables that flint_plugins/codegen.py writes from flint_plugins/ops.py.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace flint {

/// An element type as one bit, so that a set of types is a mask.
enum class DType : uint8_t { kBF16 = 1, kF32 = 2, kI32 = 4, kI8 = 8 };
using DTypeMask = uint8_t;

template <typename... Types>
constexpr DTypeMask maskOf(Types... types) {
    return (static_cast<DTypeMask>(types) | ...);
}

/// Index of a dimension symbol (`symbol::T` …) in `Symbols`.
using Symbol = uint8_t;
inline constexpr Symbol kNO_SYMBOL = 255;
inline constexpr int64_t kUNKNOWN = -1;
/// The value of every symbol, kUNKNOWN where the node does not bind it.
using Symbols = std::array<int64_t, 32>;

/// The value of a plugin field; the alternative is the field's type.
using FieldValue = std::variant<int32_t, float, std::string>;

struct Field {
    char const* name;
    /// Any value of the field's type.
    FieldValue type;
    /// Allowed values of a string field; empty: any.
    std::vector<char const*> choices;
    /// The symbol that the field fixes, or kNO_SYMBOL.
    Symbol symbol;
};

/// factor * product of symbols / divisor.
struct Dim {
    char const* text;
    int64_t factor;
    int64_t divisor;
    std::vector<Symbol> symbols;
};

/// Holds where the field of that index (in `Op::fields`) has that value.
struct Condition {
    int field;
    FieldValue value;
};

struct Binding {
    char const* name;
    DTypeMask dtypes;
    std::vector<Dim> shape;
    /// The binding exists where all of these hold.
    std::vector<Condition> when;
    /// Of an output: the input whose memory it shares, or "".
    char const* alias;
};

/// An equation between symbols.
struct Check {
    char const* text;
    bool (*holds)(Symbols const&);
};

struct Op {
    char const* name;
    std::vector<Field> fields;
    std::vector<Binding> inputs;
    std::vector<Binding> outputs;
    std::vector<Check> checks;
};

} // namespace flint
