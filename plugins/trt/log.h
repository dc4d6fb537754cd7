// Messages to TensorRT's logger, or to stderr where there is none.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace flint {

/// Called once by TensorRT when it loads the library.
void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;

void logError(std::string const& message) noexcept;

/// While it lives, errors of its thread are kept in it rather than logged: the plugin host returns them to its caller.
class LogCapture {
  public:
    LogCapture() noexcept;
    ~LogCapture();
    LogCapture(LogCapture const&) = delete;
    LogCapture& operator=(LogCapture const&) = delete;

    /// The messages so far, separated by "; ".
    std::string const& text() const { return mText; }

  private:
    friend void logError(std::string const& message) noexcept;

    std::string mText;
    LogCapture* mOuter;
};

/// Run `body`, which returns a value like `failure`. An exception becomes a logged error and `failure`: none may leave
/// a TensorRT interface, all of which are noexcept.
template <typename T, typename Body>
T guarded(T failure, std::string const& who, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        logError(who + ": " + error.what());
    } catch (...) {
        logError(who + ": unknown exception");
    }
    return failure;
}

} // namespace flint
