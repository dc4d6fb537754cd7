// Per op: fill its launcher's params from a node's symbols, fields and pointers, and launch.
#pragma once

#include "trt/enqueue.h"

namespace flint {

cudaError_t enqueueEmbedding(EnqueueArgs const& args);
cudaError_t enqueueLinear(EnqueueArgs const& args);
size_t linearWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueLmHead(EnqueueArgs const& args);
cudaError_t enqueueNormMlp(EnqueueArgs const& args);
size_t normMlpWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueNormMoe(EnqueueArgs const& args);
size_t normMoeWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueNormQkvAttention(EnqueueArgs const& args);
size_t normQkvAttentionWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueNormQkvRope(EnqueueArgs const& args);
size_t normQkvRopeWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueSample(EnqueueArgs const& args);
size_t sampleWorkspace(Node const& node, Symbols const& symbols);
cudaError_t enqueueSinkAttention(EnqueueArgs const& args);
size_t sinkAttentionWorkspace(Node const& node, Symbols const& symbols);

} // namespace flint
