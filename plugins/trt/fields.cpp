#include "trt/fields.h"

#include <cstring>
#include <limits>
#include <optional>

namespace flint {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

PluginFieldType fieldType(FieldValue const& value) {
    PluginFieldType const types[] = {PluginFieldType::kINT32, PluginFieldType::kFLOAT32, PluginFieldType::kCHAR};
    return types[value.index()];
}

char const* typeName(FieldValue const& value) {
    char const* const names[] = {"one INT32", "one FLOAT32", "a string"};
    return names[value.index()];
}

template <typename T>
T read(PluginField const& field) {
    T value;
    std::memcpy(&value, field.data, sizeof value); // TensorRT promises no alignment.
    return value;
}

/// The value, or nothing if the field's type or length is not that of `wanted`.
std::optional<FieldValue> convert(PluginField const& field, FieldValue const& wanted) {
    if (std::holds_alternative<std::string>(wanted)) {
        if (field.type != PluginFieldType::kCHAR || field.length < 0 || (field.length > 0 && !field.data)) {
            return std::nullopt;
        }
        // The length may or may not count a final zero.
        auto const* text = static_cast<char const*>(field.data);
        return FieldValue{std::string(text, field.length ? strnlen(text, field.length) : 0)};
    }
    if (field.length != 1 || !field.data) {
        return std::nullopt;
    }
    if (std::holds_alternative<int32_t>(wanted)) {
        if (field.type == PluginFieldType::kINT32) {
            return FieldValue{read<int32_t>(field)};
        }
        if (field.type == PluginFieldType::kINT64) {
            auto const value = read<int64_t>(field);
            if (value == static_cast<int32_t>(value)) {
                return FieldValue{static_cast<int32_t>(value)};
            }
        }
        return std::nullopt;
    }
    if (field.type == PluginFieldType::kFLOAT32) {
        return FieldValue{read<float>(field)};
    }
    if (field.type == PluginFieldType::kFLOAT64) {
        return FieldValue{static_cast<float>(read<double>(field))};
    }
    return std::nullopt;
}

} // namespace

std::vector<PluginField> fieldNames(Op const& op) {
    std::vector<PluginField> fields;
    for (Field const& field : op.fields) {
        fields.emplace_back(field.name, nullptr, fieldType(field.type), 1);
    }
    return fields;
}

Node parseFields(Op const& op, nvinfer1::PluginFieldCollection const& collection) {
    std::vector<std::optional<FieldValue>> found(op.fields.size());
    for (int32_t i = 0; i < collection.nbFields; ++i) {
        PluginField const& given = collection.fields[i];
        size_t index = 0;
        while (index < op.fields.size() && std::strcmp(op.fields[index].name, given.name) != 0) {
            ++index;
        }
        if (index == op.fields.size()) {
            throw SchemaError(std::string("unknown field ") + given.name);
        }
        found[index] = convert(given, op.fields[index].type);
        if (!found[index]) {
            throw SchemaError(std::string("field ") + given.name + " must be " + typeName(op.fields[index].type) +
                              ", found PluginFieldType " + std::to_string(static_cast<int>(given.type)) +
                              " of length " + std::to_string(given.length));
        }
    }
    std::vector<FieldValue> values;
    for (size_t i = 0; i < found.size(); ++i) {
        if (!found[i]) {
            throw SchemaError(std::string("missing field ") + op.fields[i].name + " (" + typeName(op.fields[i].type) +
                              ")");
        }
        values.push_back(*found[i]);
    }
    return Node(op, std::move(values));
}

std::vector<PluginField> serializedFields(Node const& node) {
    std::vector<PluginField> fields;
    for (size_t i = 0; i < node.fields().size(); ++i) {
        FieldValue const& value = node.fields()[i];
        char const* name = node.op().fields[i].name;
        if (auto const* text = std::get_if<std::string>(&value)) {
            fields.emplace_back(name, text->data(), PluginFieldType::kCHAR, static_cast<int32_t>(text->size()));
        } else if (auto const* integer = std::get_if<int32_t>(&value)) {
            fields.emplace_back(name, integer, PluginFieldType::kINT32, 1);
        } else {
            fields.emplace_back(name, std::get_if<float>(&value), PluginFieldType::kFLOAT32, 1);
        }
    }
    return fields;
}

} // namespace flint
