# Defines gla_ext::torch: torch's headers, libtorch_cpu and libc10.
#
# torch's own CMake package is not used: with a CUDA build of torch it is fatal where the CUDA
# toolkit is absent, and where the toolkit is present it adds architectures that nvcc 13 refuses.
#
# torch is looked for in this order: GLA_EXT_TORCH_ROOT (the folder that holds include/ and lib/),
# Torch_DIR, CMAKE_PREFIX_PATH, the Python in Python3_EXECUTABLE, then the Pythons of the list
# GLA_EXT_PYTHONS.
if(TARGET gla_ext::torch)
  return()
endif()

function(gla_ext_find_torch_root result)
  set(root "${GLA_EXT_TORCH_ROOT}")
  if(NOT root AND Torch_DIR)
    get_filename_component(root "${Torch_DIR}/../../.." ABSOLUTE)
  endif()
  if(NOT root AND CMAKE_PREFIX_PATH)
    find_path(found share/cmake/Torch/TorchConfig.cmake PATHS ${CMAKE_PREFIX_PATH}
              PATH_SUFFIXES . .. ../.. NO_DEFAULT_PATH NO_CACHE)
    if(found)
      get_filename_component(root "${found}" ABSOLUTE)
    endif()
  endif()
  foreach(python IN LISTS Python3_EXECUTABLE GLA_EXT_PYTHONS)
    if(NOT root)
      execute_process(
        COMMAND "${python}" -c
                "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endforeach()
  if(NOT EXISTS "${root}/include/ATen/ATen.h")
    message(FATAL_ERROR "gla_ext needs torch: pass -DPython3_EXECUTABLE=<a Python that has torch> "
                        "or -DGLA_EXT_TORCH_ROOT=<the folder of torch's include/ and lib/>.")
  endif()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(gla_ext_import_torch)
  gla_ext_find_torch_root(root)
  set(GLA_EXT_TORCH_ROOT "${root}" PARENT_SCOPE)

  # The C++ standard that torch's headers want changes with its version; its package knows.
  set(standard 17)
  file(STRINGS "${root}/share/cmake/Torch/TorchConfig.cmake" line
       REGEX "(CXX_STANDARD |cxx_std_)[0-9]+")
  if(line MATCHES "(CXX_STANDARD |cxx_std_)([0-9]+)")
    set(standard ${CMAKE_MATCH_2})
  endif()

  add_library(gla_ext::c10 SHARED IMPORTED)
  set_target_properties(gla_ext::c10 PROPERTIES IMPORTED_LOCATION "${root}/lib/libc10.so")
  add_library(gla_ext::torch SHARED IMPORTED)
  set_target_properties(gla_ext::torch PROPERTIES IMPORTED_LOCATION "${root}/lib/libtorch_cpu.so")
  target_include_directories(
    gla_ext::torch SYSTEM INTERFACE "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_features(gla_ext::torch INTERFACE cxx_std_${standard})
  target_link_libraries(gla_ext::torch INTERFACE gla_ext::c10)
  # libtorch_cpu finds the CUDA libraries that it was built with through its own rpath when it is
  # loaded. The linker need not, and must not take the toolkit's of another version for them.
  target_link_options(gla_ext::torch INTERFACE LINKER:--allow-shlib-undefined)
  message(STATUS "gla_ext: torch in ${root}, C++${standard}")
endfunction()

gla_ext_import_torch()
