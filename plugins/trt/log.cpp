#include "trt/log.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <utility>

// ILogger and ILoggerFinder are the two interfaces whose binary layout differs between the TensorRTs that this one
// binary serves: in TensorRT 11 and TensorRT-RTX 1.7 they derive from IVersionedInterface, whose functions then stand
// before theirs. So they are called by their place in the virtual table, not through the header's declaration.

namespace flint {

namespace {

/// Entries of IVersionedInterface: getAPILanguage, getInterfaceInfo and two destructors.
constexpr int kVERSIONED_ENTRIES = 4;

std::atomic<nvinfer1::ILoggerFinder*> gFinder{nullptr};
/// Place of findLogger and of log in their virtual tables.
std::atomic<int> gFirstEntry{0};
/// The innermost capture of this thread.
thread_local LogCapture* tCapture = nullptr;

void* const* virtualTable(void const* object) {
    return *static_cast<void* const* const*>(object);
}

/// Where the first function of the finder's own stands, by the version of the library that implements it.
int firstEntry(nvinfer1::ILoggerFinder const* finder) {
    int const asInHeaders = NV_TENSORRT_MAJOR >= 11 ? kVERSIONED_ENTRIES : 0;
    Dl_info info{};
    if (!dladdr(virtualTable(finder), &info) || !info.dli_fname) {
        return asInHeaders;
    }
    void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) {
        return asInHeaders;
    }
    auto const getVersion = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
    int32_t const version = getVersion ? getVersion() : 0;
    dlclose(library); // Drops the reference that dlopen added; TensorRT itself stays.
    if (version == 0) {
        return asInHeaders; // Not TensorRT.
    }
    // major * 10000 + minor * 100 + patch: 101401 is TensorRT 10.14.1, 10701 TensorRT-RTX 1.7.1.
    bool const rtx = version < 20000;
    return version >= (rtx ? 10700 : 110000) ? kVERSIONED_ENTRIES : 0;
}

} // namespace

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept {
    gFirstEntry = finder ? firstEntry(finder) : 0;
    gFinder = finder;
}

LogCapture::LogCapture() noexcept : mOuter(std::exchange(tCapture, this)) {}

LogCapture::~LogCapture() {
    tCapture = mOuter;
}

void logError(std::string const& message) noexcept {
    constexpr int32_t kERROR = 1; // nvinfer1::ILogger::Severity::kERROR
    try {
        if (tCapture) {
            tCapture->mText += (tCapture->mText.empty() ? "" : "; ") + message;
            return;
        }
        void* const finder = gFinder;
        int const entry = gFirstEntry;
        void* logger = nullptr;
        if (finder) {
            logger = reinterpret_cast<void* (*)(void*)>(virtualTable(finder)[entry])(finder);
        }
        if (logger) {
            auto const log = reinterpret_cast<void (*)(void*, int32_t, char const*)>(virtualTable(logger)[entry]);
            log(logger, kERROR, message.c_str());
            return;
        }
    } catch (...) { // Nothing better to do than the fallback.
    }
    std::fprintf(stderr, "[flint] %s\n", message.c_str());
}

} // namespace flint
