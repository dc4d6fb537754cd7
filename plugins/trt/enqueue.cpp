#include "trt/enqueue.h"

#include "trt/ops/ops.h"

#include <utility>

namespace flint {

namespace {

std::pair<std::string_view, Kernel> const kKERNELS[] = {
    {"Embedding", {enqueueEmbedding, nullptr}},
    {"Linear", {enqueueLinear, linearWorkspace}},
    {"LmHead", {enqueueLmHead, nullptr}},
    {"NormMlp", {enqueueNormMlp, normMlpWorkspace}},
    {"NormMoe", {enqueueNormMoe, normMoeWorkspace}},
    {"NormQkvAttention", {enqueueNormQkvAttention, normQkvAttentionWorkspace}},
    {"NormQkvRope", {enqueueNormQkvRope, normQkvRopeWorkspace}},
    {"Sample", {enqueueSample, sampleWorkspace}},
    {"SinkAttention", {enqueueSinkAttention, sinkAttentionWorkspace}},
};

} // namespace

Kernel const* findKernel(std::string_view op) {
    for (auto const& [name, kernel] : kKERNELS) {
        if (name == op) {
            return &kernel;
        }
    }
    return nullptr;
}

} // namespace flint
