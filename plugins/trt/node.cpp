#include "trt/node.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace flint {

namespace {

std::string join(std::vector<std::string> const& parts, char const* separator) {
    std::string text;
    for (size_t i = 0; i < parts.size(); ++i) {
        text += (i ? separator : "") + parts[i];
    }
    return text;
}

std::string dimsText(std::vector<Dim> const& shape) {
    std::vector<std::string> parts;
    for (Dim const& dim : shape) {
        parts.emplace_back(dim.text);
    }
    return "[" + join(parts, ", ") + "]";
}

int indexOf(std::vector<Binding const*> const& bindings, std::string_view name) {
    auto const found = std::find_if(bindings.begin(), bindings.end(), [&](auto* b) { return name == b->name; });
    return found == bindings.end() ? -1 : static_cast<int>(found - bindings.begin());
}

/// Product of the dimension's factor and its symbols, leaving out `without`.
int64_t product(Dim const& dim, Symbols const& symbols, Symbol without = kNO_SYMBOL) {
    int64_t value = dim.factor;
    for (Symbol symbol : dim.symbols) {
        value *= symbol == without ? 1 : symbols[symbol];
    }
    return value;
}

[[noreturn]] void mismatch(char const* kind, Binding const& binding, Shape const& found, Dim const& dim,
                           int64_t numerator) {
    std::string value = std::to_string(numerator / dim.divisor);
    if (numerator % dim.divisor) {
        value = std::to_string(numerator) + "/" + std::to_string(dim.divisor);
    }
    throw SchemaError(std::string(kind) + " " + binding.name + " " + shapeText(found) + " does not match " +
                      dimsText(binding.shape) + ": " + dim.text + " = " + value);
}

} // namespace

std::string dtypeNames(DTypeMask mask) {
    std::pair<DType, char const*> const names[] = {
        {DType::kBF16, "bf16"}, {DType::kF32, "f32"}, {DType::kI32, "i32"}, {DType::kI8, "i8"}};
    std::vector<std::string> parts;
    for (auto const& [dtype, name] : names) {
        if (mask & maskOf(dtype)) {
            parts.emplace_back(name);
        }
    }
    return join(parts, " or ");
}

std::string shapeText(Shape const& shape) {
    std::vector<std::string> parts;
    for (int64_t size : shape) {
        parts.push_back(std::to_string(size));
    }
    return "[" + join(parts, ", ") + "]";
}

Node::Node(Op const& op, std::vector<FieldValue> fields) : mOp(&op), mFields(std::move(fields)) {
    mFieldSymbols.fill(kUNKNOWN);
    for (size_t i = 0; i < op.fields.size(); ++i) {
        Field const& field = op.fields[i];
        if (!field.choices.empty()) {
            auto const& value = std::get<std::string>(mFields[i]);
            if (std::none_of(field.choices.begin(), field.choices.end(), [&](auto* c) { return value == c; })) {
                std::vector<std::string> const choices(field.choices.begin(), field.choices.end());
                throw SchemaError(std::string("field ") + field.name + " must be " + join(choices, " or ") +
                                  ", found '" + value + "'");
            }
        }
        if (field.symbol != kNO_SYMBOL) {
            mFieldSymbols[field.symbol] = std::get<int32_t>(mFields[i]);
            if (mFieldSymbols[field.symbol] <= 0) {
                throw SchemaError(std::string("field ") + field.name + " must be positive, found " +
                                  std::to_string(mFieldSymbols[field.symbol]));
            }
        }
    }
    for (Binding const& binding : op.inputs) {
        if (present(binding)) {
            mInputs.push_back(&binding);
        }
    }
    for (Binding const& binding : op.outputs) {
        if (present(binding)) {
            mOutputs.push_back(&binding);
            mAliases.push_back(*binding.alias ? inputIndex(binding.alias) : -1);
        }
    }
    planSteps();
}

FieldValue const& Node::field(std::string_view name) const {
    for (size_t i = 0; i < mFields.size(); ++i) {
        if (name == mOp->fields[i].name) {
            return mFields[i];
        }
    }
    throw SchemaError("has no field " + std::string(name));
}

bool Node::present(Binding const& binding) const {
    return std::all_of(binding.when.begin(), binding.when.end(),
                       [&](Condition const& c) { return mFields[c.field] == c.value; });
}

void Node::planSteps() {
    std::vector<Step> pending;
    for (size_t i = 0; i < mInputs.size(); ++i) {
        for (size_t axis = 0; axis < mInputs[i]->shape.size(); ++axis) {
            pending.push_back({static_cast<int>(i), static_cast<int>(axis), kNO_SYMBOL});
        }
    }
    std::array<bool, std::tuple_size_v<Symbols>> known{};
    for (size_t i = 0; i < known.size(); ++i) {
        known[i] = mFieldSymbols[i] != kUNKNOWN;
    }
    // A dimension may depend on symbols that a later input binds: go round until nothing is unknown.
    while (!pending.empty()) {
        std::vector<Step> rest;
        for (Step step : pending) {
            int unknown = 0;
            for (Symbol symbol : mInputs[step.input]->shape[step.axis].symbols) {
                if (!known[symbol]) {
                    step.binds = symbol;
                    ++unknown;
                }
            }
            if (unknown > 1) {
                rest.push_back({step.input, step.axis, kNO_SYMBOL});
                continue;
            }
            if (step.binds != kNO_SYMBOL) {
                known[step.binds] = true;
            }
            mSteps.push_back(step);
        }
        if (rest.size() == pending.size()) {
            throw SchemaError("its schema leaves symbols undetermined");
        }
        pending = std::move(rest);
    }
}

int Node::inputIndex(std::string_view name) const {
    return indexOf(mInputs, name);
}

int Node::outputIndex(std::string_view name) const {
    return indexOf(mOutputs, name);
}

void Node::checkCounts(int inputs, int outputs) const {
    auto const check = [](char const* kind, std::vector<Binding const*> const& wanted, int found) {
        if (static_cast<int>(wanted.size()) != found) {
            std::vector<std::string> names;
            for (Binding const* binding : wanted) {
                names.emplace_back(binding->name);
            }
            throw SchemaError("expected " + std::to_string(wanted.size()) + " " + kind + " (" + join(names, ", ") +
                              "), found " + std::to_string(found));
        }
    };
    check("inputs", mInputs, inputs);
    check("outputs", mOutputs, outputs);
}

void Node::checkInputType(int input, DTypeMask found, std::string const& foundName) const {
    Binding const& binding = *mInputs[input];
    if (!(binding.dtypes & found)) {
        throw SchemaError(std::string("input ") + binding.name + " must be " + dtypeNames(binding.dtypes) + ", found " +
                          foundName);
    }
}

void Node::checkInputRank(int input, int found) const {
    Binding const& binding = *mInputs[input];
    if (static_cast<int>(binding.shape.size()) != found) {
        throw SchemaError(std::string("input ") + binding.name + " must be " + dimsText(binding.shape) + ", found " +
                          std::to_string(found) + " dimensions");
    }
}

Symbols Node::solve(std::span<Shape const> inputs) const {
    checkCounts(static_cast<int>(inputs.size()), static_cast<int>(mOutputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) {
        checkInputRank(static_cast<int>(i), static_cast<int>(inputs[i].size()));
    }
    Symbols symbols = mFieldSymbols;
    for (Step const& step : mSteps) {
        Binding const& binding = *mInputs[step.input];
        Dim const& dim = binding.shape[step.axis];
        int64_t const numerator = inputs[step.input][step.axis] * dim.divisor;
        int64_t const known = product(dim, symbols, step.binds);
        if (step.binds == kNO_SYMBOL) {
            if (numerator != known) {
                mismatch("input", binding, inputs[step.input], dim, known);
            }
        } else if (known == 0 || numerator % known) {
            throw SchemaError(std::string("input ") + binding.name + " " + shapeText(inputs[step.input]) + ": " +
                              dim.text + " is not whole");
        } else {
            symbols[step.binds] = numerator / known;
        }
    }
    for (Check const& check : mOp->checks) {
        if (!check.holds(symbols)) {
            std::vector<std::string> values;
            for (size_t i = 0; i < std::size(kSYMBOL_NAMES); ++i) {
                if (symbols[i] != kUNKNOWN) {
                    values.push_back(std::string(kSYMBOL_NAMES[i]) + "=" + std::to_string(symbols[i]));
                }
            }
            throw SchemaError(std::string(check.text) + " does not hold for " + join(values, ", "));
        }
    }
    return symbols;
}

void Node::checkOutputs(std::span<Shape const> outputs, Symbols const& symbols) const {
    checkCounts(static_cast<int>(mInputs.size()), static_cast<int>(outputs.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
        Binding const& binding = *mOutputs[i];
        if (outputs[i].size() != binding.shape.size()) {
            throw SchemaError(std::string("output ") + binding.name + " must be " + dimsText(binding.shape) +
                              ", found " + shapeText(outputs[i]));
        }
        for (size_t axis = 0; axis < outputs[i].size(); ++axis) {
            int64_t const wanted = product(binding.shape[axis], symbols);
            if (outputs[i][axis] * binding.shape[axis].divisor != wanted) {
                mismatch("output", binding, outputs[i], binding.shape[axis], wanted);
            }
        }
    }
}

} // namespace flint
