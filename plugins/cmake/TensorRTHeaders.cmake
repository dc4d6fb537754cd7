# flint_find_tensorrt_headers(): sets TensorRT_INCLUDE_DIR unless the caller has.
#
# The headers only declare interfaces: the library links against no TensorRT, so that one binary serves TensorRT 10, 11
# and TensorRT-RTX. Without a TensorRT SDK they come from a wheel, pinned by hash, into the build folder.
function(flint_find_tensorrt_headers)
  set(TensorRT_INCLUDE_DIR "" CACHE PATH "Folder that holds NvInferRuntime.h; empty: fetch the headers with pip")
  if(TensorRT_INCLUDE_DIR)
    if(NOT EXISTS "${TensorRT_INCLUDE_DIR}/NvInferRuntime.h")
      message(FATAL_ERROR "TensorRT_INCLUDE_DIR is ${TensorRT_INCLUDE_DIR}, but there is no NvInferRuntime.h in it. "
        "Set it to the include folder of a TensorRT SDK, or leave it out to fetch the headers with pip.")
    endif()
    return()
  endif()

  set(requirements "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tensorrt-headers.txt")
  file(SHA256 "${requirements}" pin)
  set(folder "${PROJECT_BINARY_DIR}/tensorrt-headers")
  set(include "${folder}/kernel_lens/include/tensorrt")
  set(stamp "${folder}/${pin}.stamp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${requirements}")

  if(NOT EXISTS "${stamp}")
    message(STATUS "Fetching the TensorRT headers with pip")
    file(REMOVE_RECURSE "${folder}")
    file(MAKE_DIRECTORY "${folder}")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes
              --only-binary=:all: --dest "${folder}" -r "${requirements}"
      RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    file(GLOB wheel "${folder}/*.whl")
    if(NOT status EQUAL 0 OR NOT wheel)
      message(FATAL_ERROR "The TensorRT headers could not be fetched: `${Python_EXECUTABLE} -m pip download -r "
        "${requirements}` failed (${status}). Give pip access to a package index, or set TensorRT_INCLUDE_DIR to the "
        "include folder of a TensorRT SDK (with pip: --config-settings=cmake.define.TensorRT_INCLUDE_DIR=DIR). "
        "pip said:\n${output}")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${folder}" PATTERNS "kernel_lens/include/tensorrt/*")
    if(NOT EXISTS "${include}/NvInferRuntime.h")
      message(FATAL_ERROR "${wheel} holds no include/tensorrt/NvInferRuntime.h. Set TensorRT_INCLUDE_DIR to the include "
        "folder of a TensorRT SDK instead.")
    endif()
    file(WRITE "${stamp}" "")
  endif()
  set(TensorRT_INCLUDE_DIR "${include}" PARENT_SCOPE)
endfunction()
