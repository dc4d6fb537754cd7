# flint_cuda_architectures(<targets> <out>): the CUDA architectures of targets such as sm90;sm120.
#
# Machine code only, each for one architecture ("a"): the kernels use instructions that PTX for later GPUs lacks.
function(flint_cuda_architectures targets out)
  set(architectures "")
  foreach(target IN LISTS targets)
    if(NOT target MATCHES "^sm(90|100|103|120|121)$")
      message(FATAL_ERROR "FLINT_TARGETS holds '${target}'; known targets are sm90 (H100, H200), sm100 (B200, GB200), "
        "sm103 (B300, GB300), sm120 (RTX 50, RTX PRO 6000 Blackwell) and sm121 (GB10), separated by semicolons.")
    endif()
    list(APPEND architectures "${CMAKE_MATCH_1}a-real")
  endforeach()
  if(NOT architectures)
    message(FATAL_ERROR "FLINT_TARGETS is empty; give at least one target, such as sm120.")
  endif()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()
