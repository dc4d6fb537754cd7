#include "trt/creators.h"

#include "trt/fields.h"
#include "trt/log.h"
#include "trt/plugin.h"

#include <memory>
#include <vector>

namespace flint {

namespace {

class FlintCreator final : public nvinfer1::IPluginCreatorV3One {
  public:
    explicit FlintCreator(Op const& op)
        : mOp(op), mFields(fieldNames(op)), mCollection{static_cast<int32_t>(mFields.size()), mFields.data()} {}

    /// nullptr, and a logged error, where the fields are not what the schema says.
    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fc,
                                      nvinfer1::TensorRTPhase) noexcept override {
        return guarded<nvinfer1::IPluginV3*>(nullptr, nodeName(mOp, name), [&]() -> nvinfer1::IPluginV3* {
            Node node = parseFields(mOp, fc ? *fc : nvinfer1::PluginFieldCollection{});
            return new FlintPlugin(std::move(node), name ? name : "");
        });
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    char const* getPluginName() const noexcept override { return mOp.name; }
    char const* getPluginVersion() const noexcept override { return kOP_VERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

  private:
    Op const& mOp;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

} // namespace

std::span<nvinfer1::IPluginCreatorInterface* const> creators() {
    // Never freed: TensorRT's registry may outlive the library's static objects.
    static auto const& list = *[] {
        auto* all = new std::vector<nvinfer1::IPluginCreatorInterface*>;
        for (Op const& op : allOps()) {
            all->push_back(new FlintCreator(op));
        }
        return all;
    }();
    return list;
}

} // namespace flint
