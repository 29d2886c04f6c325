# The CUDA kernels: compiled by the toolkit and for the architectures that setup.py would take, unless the user
# chose others (CMAKE_CUDA_COMPILER, CMAKE_CUDA_ARCHITECTURES).

find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/toolchain.py ${TORCH_INSTALL_PREFIX}
          "${CMAKE_CUDA_COMPILER}" "${CMAKE_CUDA_ARCHITECTURES}"
  OUTPUT_FILE ${PROJECT_BINARY_DIR}/toolchain.cmake RESULT_VARIABLE failed ERROR_VARIABLE error)
if(failed)
  message(FATAL_ERROR "${error}")
endif()
include(${PROJECT_BINARY_DIR}/toolchain.cmake)

# For CMake's own trial of the compiler: nvcc looks in lib64, PyPI's libraries are in lib.
get_filename_component(toolkit ${CMAKE_CUDA_COMPILER}/../.. REALPATH)
set(ENV{LIBRARY_PATH} ${toolkit}/lib:$ENV{LIBRARY_PATH})
enable_language(CUDA)

target_sources(lltm_ext PRIVATE ${kernels})
set_target_properties(lltm_ext PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}"
                      CUDA_STANDARD ${CMAKE_CXX_STANDARD} CUDA_RUNTIME_LIBRARY None)
target_include_directories(lltm_ext SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_definitions(lltm_ext PRIVATE LLTM_EXT_WITH_CUDA)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90")
  target_compile_definitions(lltm_ext PRIVATE LLTM_EXT_SM90A)
endif()
target_compile_options(
  lltm_ext PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
                   $<$<COMPILE_LANGUAGE:CUDA>:${smallest_code}>
                   $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>
                   # The library embeds headers for the compiler at run time (src/common/runtime).
                   $<$<COMPILE_LANGUAGE:CXX>:-Wa,-I${PROJECT_SOURCE_DIR}/src>)

# By its file name: PyPI has no libcudart.so, but libcudart.so.13.
string(REGEX MATCH "^[0-9]+" major ${CMAKE_CUDA_COMPILER_VERSION})
find_library(LLTM_EXT_CUDART NAMES libcudart.so libcudart.so.${major} 
             HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${toolkit}/lib NO_DEFAULT_PATH REQUIRED)
target_link_libraries(lltm_ext PRIVATE ${LLTM_EXT_CUDART})
get_filename_component(cudart_folder ${LLTM_EXT_CUDART} DIRECTORY)
set_property(TARGET lltm_ext APPEND PROPERTY INSTALL_RPATH ${cudart_folder})
